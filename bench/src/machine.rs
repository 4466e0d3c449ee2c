//! Values of `/proc` about this machine and its processes.

use std::time::Instant;
use std::{fmt, fs};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Unit of `/proc/stat`: always 100, whatever the kernel's own tick is.
const TICKS_PER_SECOND: f64 = 100.0;
/// Bytes of the packet that a processor is classified with, and the time in which class A seals it.
const PACKET: usize = 1420;
const MAX_SEAL_NS: f64 = 900.0;
const SEAL_ROUNDS: usize = 20;
const SEALS: u64 = 1000;

/// Time that all cores together have spent since the machine started, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CpuTimes {
    pub(crate) total: f64,
    /// Programs, nice or not, outside of the kernel.
    pub(crate) user: f64,
    pub(crate) softirq: f64,
    /// Taken away by the hypervisor.
    pub(crate) steal: f64,
}

impl CpuTimes {
    pub(crate) fn now() -> Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
        Self::parse(&text).context("/proc/stat is not as expected")
    }

    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<f64> = text
            .strip_prefix("cpu ")?
            .lines()
            .next()?
            .split_whitespace()
            .map(|field| field.parse::<f64>().ok().map(|ticks| ticks / TICKS_PER_SECOND))
            .collect::<Option<_>>()?;
        // user nice system idle iowait irq softirq steal; guests are counted in user already.
        let total = fields.get(..8)?.iter().sum();
        Some(Self { total, user: fields[0] + fields[1], softirq: fields[6], steal: fields[7] })
    }

    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            total: self.total - before.total,
            user: self.user - before.user,
            softirq: self.softirq - before.softirq,
            steal: self.steal - before.steal,
        }
    }

    /// Share of all time that the hypervisor took away.
    pub(crate) fn steal_share(self) -> f64 {
        if self.total > 0.0 { self.steal / self.total } else { 0.0 }
    }
}

/// CPU time that a process or several have used so far, all threads, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ProcessTimes {
    pub(crate) user: f64,
    pub(crate) system: f64,
}

impl ProcessTimes {
    pub(crate) fn of(pids: &[i32]) -> Result<Self> {
        pids.iter().try_fold(Self::default(), |sum, pid| {
            let path = format!("/proc/{pid}/stat");
            let text = fs::read_to_string(&path).with_context(|| format!("{pid} has ended"))?;
            let one = Self::parse(&text).with_context(|| format!("{path} is not as expected"))?;
            Ok(Self { user: sum.user + one.user, system: sum.system + one.system })
        })
    }

    pub(crate) fn total(self) -> f64 {
        self.user + self.system
    }

    /// utime and stime, 12th and 13th field after the program's name, which may hold anything.
    fn parse(stat: &str) -> Option<Self> {
        let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
        let mut seconds =
            || fields.next()?.parse::<f64>().ok().map(|ticks| ticks / TICKS_PER_SECOND);
        Some(Self { user: seconds()?, system: seconds()? })
    }
}

/// TCP segments that the calling thread's network namespace has sent again so far.
pub(crate) fn retransmits() -> Result<u64> {
    let text = fs::read_to_string("/proc/thread-self/net/snmp").context("reading net/snmp")?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    names
        .split(' ')
        .zip(values.split(' '))
        .find_map(|(name, value)| (name == "RetransSegs").then(|| value.parse().ok()).flatten())
        .context("net/snmp has no RetransSegs")
}

/// Processor and kernel that figures come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Name, family and model, of which the name alone may be that of a whole series.
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) kernel: String,
}

impl Machine {
    pub(crate) fn this() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            processor: processor(&read("/proc/cpuinfo")),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }

    /// Name of the files with its results: letters, digits and hyphens.
    pub(crate) fn file_name(&self) -> String {
        let text = format!("{} {} cores", self.processor, self.cores).to_lowercase();
        let words =
            text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        words.collect::<Vec<_>>().join("-")
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cores, {}, Linux {}", self.cores, self.processor, self.kernel)
    }
}

fn processor(cpuinfo: &str) -> String {
    let field = |name: &str| {
        let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
    };
    let name = field("model name").unwrap_or("unknown processor");
    match (field("cpu family"), field("model")) {
        (Some(family), Some(model)) => format!("{name} (family {family}, model {model})"),
        (None, _) | (_, None) => name.to_owned(),
    }
}

/// Processors by the speed of their ciphers: bars for TCP are lower on fast ones, where the cipher
/// is less of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Class {
    /// ring seals a packet of 1,420 bytes in less than 900 ns.
    A,
    S,
}

impl Class {
    pub(crate) fn of(seal_ns: f64) -> Self {
        if seal_ns < MAX_SEAL_NS { Self::A } else { Self::S }
    }
}

/// Time that ring takes for one packet, in nanoseconds: the least of several rounds, as whatever
/// else runs only adds to it.
pub(crate) fn seal_ns() -> f64 {
    let key = aead::Key::new(&[7; 32]);
    let mut packet = [0; PACKET];
    let rounds = (0..SEAL_ROUNDS).map(|_| {
        let start = Instant::now();
        for counter in 0..SEALS {
            std::hint::black_box(key.seal(aead::nonce(counter), &[], &mut packet));
        }
        start.elapsed().as_secs_f64() * 1e9 / SEALS as f64
    });
    rounds.fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steal_is_a_share_of_all_time() {
        let at = |line: &str| CpuTimes::parse(line).unwrap();
        let before = at("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1\n");
        let after = at("cpu  200 0 150 900 0 0 40 10 50 0\ncpu0 1\n");
        let spent = after.since(before);
        assert_eq!((spent.total, spent.softirq, spent.steal), (3.0, 0.4, 0.1));
        assert!((spent.steal_share() - 1.0 / 30.0).abs() < 1e-9);
    }

    #[test]
    fn program_name_with_parenthesis_is_parsed() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 1 2 3 4 150 50 0 0 20 0 1 0";
        let times = ProcessTimes::parse(stat).unwrap();
        assert_eq!((times.user, times.system, times.total()), (1.5, 0.5, 2.0));
        assert!(ProcessTimes::of(&[std::process::id().cast_signed()]).is_ok());
    }

    #[test]
    fn this_machine_can_be_measured() {
        assert!(CpuTimes::now().unwrap().total > 0.0);
        retransmits().unwrap();
        assert!(Machine::this().to_string().contains("Linux"));
        assert!((50.0..1e6).contains(&seal_ns()));
    }

    #[test]
    fn processor_has_family_model_and_file_name() {
        let cpuinfo = "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n";
        let processor = processor(cpuinfo);
        assert_eq!(processor, "AMD EPYC (family 26, model 17)");
        let machine = Machine { processor, cores: 2, kernel: String::new() };
        assert_eq!(machine.file_name(), "amd-epyc-family-26-model-17-2-cores");
        assert_eq!(super::processor("Features : fp\n"), "unknown processor");
    }

    #[test]
    fn class_a_seals_below_900_ns() {
        assert_eq!((Class::of(899.9), Class::of(900.0)), (Class::A, Class::S));
    }
}
