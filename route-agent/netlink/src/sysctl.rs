use std::fs::{self, File};
use std::future::pending;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use netplan::Sysctl;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::{NetlinkError, Netns};

/// Longest text of a setting that is one number.
const LONGEST: usize = 16;
/// Directories with the settings. A container's own /proc/sys is read-only, so its pod mounts the
/// host's /proc/sys/net there; which namespace's settings are in it depends on who looks.
const ROOTS: [&str; 2] = ["/host/proc/sys", "/proc/sys"];

static ROOT: LazyLock<&str> = LazyLock::new(|| first_with_net(&ROOTS).unwrap_or("/proc/sys"));

/// The value of a setting in `netns`; `None` if there is no such setting or device.
pub fn read_sysctl(netns: &Netns, sysctl: &Sysctl) -> Result<Option<u32>, NetlinkError> {
    let path = path_of(sysctl);
    match netns.run(|| fs::read_to_string(&path))? {
        Ok(text) => Ok(text.trim().parse().ok()),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(NetlinkError::Sysctl { path, source }),
    }
}

pub fn write_sysctl(netns: &Netns, sysctl: &Sysctl, value: u32) -> Result<(), NetlinkError> {
    let path = path_of(sysctl);
    netns
        .run(|| fs::write(&path, value.to_string()))?
        .map_err(|source| NetlinkError::Sysctl { path, source })
}

/// Watch of settings, which any program may change.
///
/// The kernel notifies only of a few, those without which no packet passes among them (`Events`), so all are read
/// again and again, from files that stay open: some 20 microseconds of work each time.
#[derive(Debug, Default)]
pub struct Settings {
    files: Vec<(File, Value)>,
    /// Times of the reads. tokio's own clock would wake up twice for each.
    timer: Option<AsyncFd<OwnedFd>>,
    /// Reads the files once a change has been awaited: apart from the rest that is awaited beside it,
    /// all of which each read would poll.
    task: Option<Task>,
}

#[derive(Debug)]
struct Task {
    changes: Arc<Notify>,
    handle: JoinHandle<()>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

/// A setting as it is written; empty if its device is gone.
type Value = ([u8; LONGEST], usize);

impl Settings {
    /// Those that are there, in `netns`, read once an interval.
    pub fn watch<'a>(
        netns: &Netns,
        sysctls: impl Iterator<Item = &'a Sysctl> + Send,
        interval: Duration,
    ) -> Result<Self, NetlinkError> {
        let open = |sysctl: &Sysctl| {
            let file = File::open(path_of(sysctl)).ok()?;
            let value = read(&file);
            Some((file, value))
        };
        let files: Vec<_> = netns.run(|| sysctls.filter_map(open).collect())?;
        let timer = if files.is_empty() { None } else { Some(timer(interval)?) };
        Ok(Self { files, timer, task: None })
    }

    /// Watches those of `other` as well. Nobody may have awaited a change of either yet.
    pub fn and(mut self, mut other: Self) -> Self {
        self.files.append(&mut other.files);
        self.timer = self.timer.or(other.timer);
        self
    }

    /// Returns after the next change; never, if there is nothing to watch. Can be cancelled without
    /// losing one.
    pub async fn changed(&mut self) {
        if let Some(timer) = self.timer.take() {
            let (files, changes) = (std::mem::take(&mut self.files), Arc::default());
            let handle = tokio::spawn(read_repeatedly(files, timer, Arc::clone(&changes)));
            self.task = Some(Task { changes, handle });
        }
        match &self.task {
            Some(task) => task.changes.notified().await,
            None => pending().await,
        }
    }
}

async fn read_repeatedly(
    mut files: Vec<(File, Value)>,
    timer: AsyncFd<OwnedFd>,
    changes: Arc<Notify>,
) {
    // It ends with the runtime.
    while let Ok(mut ready) = timer.readable().await {
        ready.clear_ready();
        // Number of times that it has expired since.
        let _ = nix::unistd::read(timer.get_ref(), &mut [0; size_of::<u64>()]);
        let mut changed = false;
        for (file, value) in &mut files {
            let now = read(file);
            changed |= std::mem::replace(value, now) != now;
        }
        if changed {
            changes.notify_one();
        }
    }
}

fn timer(interval: Duration) -> Result<AsyncFd<OwnedFd>, NetlinkError> {
    let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
    let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags);
    let timer = timer.map_err(|e| NetlinkError::Timer(e.into()))?;
    let every = Expiration::Interval(TimeSpec::from_duration(interval));
    let started = timer.set(every, TimerSetTimeFlags::empty());
    started.map_err(|e| NetlinkError::Timer(e.into()))?;
    // SAFETY: it owns its descriptor, and nothing takes it out of the `AsyncFd`.
    #[allow(unsafe_code)]
    let timer =
        unsafe { AsyncFd::register_with_interest(OwnedFd::from(timer), Interest::READABLE) };
    timer.map_err(|e| NetlinkError::Timer(e.into()))
}

fn path_of(sysctl: &Sysctl) -> String {
    format!("{}/{}", *ROOT, sysctl.path())
}

fn first_with_net<'a>(roots: &[&'a str]) -> Option<&'a str> {
    roots.iter().copied().find(|root| Path::new(root).join("net").is_dir())
}

/// The file belongs to the namespace that it was opened in, wherever it is read.
fn read(file: &File) -> Value {
    let mut text = [0; LONGEST];
    let len = file.read_at(&mut text, 0).unwrap_or(0);
    (text, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mounted_copy_of_the_settings_is_preferred() {
        let copy = tempfile::tempdir().unwrap();
        let root = copy.path().to_str().unwrap();
        assert_eq!(first_with_net(&[root, "/proc/sys"]), Some("/proc/sys"));
        fs::create_dir(copy.path().join("net")).unwrap();
        assert_eq!(first_with_net(&[root, "/proc/sys"]), Some(root));
    }
}
