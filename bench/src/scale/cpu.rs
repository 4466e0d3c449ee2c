//! CPU time of the programs of a cluster.

use std::time::{Duration, Instant};

use anyhow::Result;
use scale::Pids;
use tokio::time::sleep;

use crate::machine::{CpuTimes, ProcessTimes};

/// A controller that uses less than this share of a core for [`QUIET_TIME`] is quiet.
const BUSY: f64 = 0.1;
const QUIET_TIME: Duration = Duration::from_secs(5);
const SAMPLE: Duration = Duration::from_millis(500);

/// CPU times at one moment.
pub(crate) struct CpuMeter {
    pids: Pids,
    since: Instant,
    before: [f64; 5],
}

/// Shares of one core since.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuShares {
    pub(crate) controller: f64,
    pub(crate) ipam: f64,
    /// Share of the API server and etcd.
    pub(crate) api_server: f64,
    /// This process: all that is simulated.
    pub(crate) simulated: f64,
    /// Programs that are not part of the measurement, outside of the kernel.
    pub(crate) others: f64,
}

impl CpuMeter {
    pub(crate) fn start(pids: &Pids) -> Result<Self> {
        Ok(Self { pids: pids.clone(), since: Instant::now(), before: seconds(pids)? })
    }

    pub(crate) fn shares(&self) -> Result<CpuShares> {
        let elapsed = self.since.elapsed().as_secs_f64();
        let now = seconds(&self.pids)?;
        let share = |i: usize| (now[i] - self.before[i]) / elapsed;
        let [controller, ipam, api_server, simulated, others] = [0, 1, 2, 3, 4].map(share);
        Ok(CpuShares { controller, ipam, api_server, simulated, others })
    }
}

fn seconds(pids: &Pids) -> Result<[f64; 5]> {
    let own = [std::process::id().cast_signed()];
    let all: [&[i32]; 4] = [&[pids.controller], &[pids.ipam], &pids.api_server, &own];
    let mut seconds = [0.0, 0.0, 0.0, 0.0, CpuTimes::now()?.user];
    for (i, pids) in all.into_iter().enumerate() {
        let times = ProcessTimes::of(pids)?;
        seconds[i] = times.total();
        seconds[4] -= times.user;
    }
    Ok(seconds)
}

/// Waits until the controller is quiet. Returns since when; `None` if it is not within that time.
pub(crate) async fn until_quiet(pids: &Pids, at_most: Duration) -> Result<Option<Instant>> {
    let start = Instant::now();
    let mut busy_until = start;
    let mut last = (start, ProcessTimes::of(&[pids.controller])?.total());
    while busy_until.elapsed() < QUIET_TIME {
        if start.elapsed() > at_most {
            return Ok(None);
        }
        sleep(SAMPLE).await;
        let (now, used) = (Instant::now(), ProcessTimes::of(&[pids.controller])?.total());
        if (used - last.1) / (now - last.0).as_secs_f64() > BUSY {
            busy_until = now;
        }
        last = (now, used);
    }
    Ok(Some(busy_until))
}
