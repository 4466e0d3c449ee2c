use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use netplan::Sysctl;
use tokio::time::{Instant, sleep_until};

use crate::{NetlinkError, Netns};

/// How often settings are looked at.
const LOOK: Duration = Duration::from_millis(200);
/// Longest text of a setting that is one number.
const LONGEST: usize = 16;

/// The value of a setting in `netns`; `None` if there is no such setting or device.
pub fn read_sysctl(netns: &Netns, sysctl: &Sysctl) -> Result<Option<u32>, NetlinkError> {
    let path = format!("/proc/sys/{}", sysctl.path());
    match netns.run(|| fs::read_to_string(&path))? {
        Ok(text) => Ok(text.trim().parse().ok()),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(NetlinkError::Sysctl { path, source }),
    }
}

pub fn write_sysctl(netns: &Netns, sysctl: &Sysctl, value: u32) -> Result<(), NetlinkError> {
    let path = format!("/proc/sys/{}", sysctl.path());
    netns
        .run(|| fs::write(&path, value.to_string()))?
        .map_err(|source| NetlinkError::Sysctl { path, source })
}

/// Tells that a setting has changed, whoever changed it.
///
/// The kernel notifies of a few settings only, so they are read again and again, from files that
/// stay open: some 20 microseconds of work five times a second.
#[derive(Debug, Default)]
pub struct Settings {
    files: Vec<(File, Value)>,
    look_at: Option<Instant>,
}

/// A setting as it is written; empty if its device is gone.
type Value = ([u8; LONGEST], usize);

impl Settings {
    /// Those that are there, in `netns`.
    pub fn watch<'a>(
        netns: &Netns,
        sysctls: impl Iterator<Item = &'a Sysctl> + Send,
    ) -> Result<Self, NetlinkError> {
        let open = |sysctl: &Sysctl| {
            let file = File::open(format!("/proc/sys/{}", sysctl.path())).ok()?;
            let value = read(&file);
            Some((file, value))
        };
        let files = netns.run(|| sysctls.filter_map(open).collect())?;
        Ok(Self { files, look_at: None })
    }

    /// Watches those of `other` as well.
    pub fn and(mut self, other: Self) -> Self {
        self.files.extend(other.files);
        self
    }

    /// Returns after the next change; never, if there is nothing to watch. Can be cancelled without
    /// losing one.
    pub async fn changed(&mut self) {
        if self.files.is_empty() {
            return std::future::pending().await;
        }
        loop {
            sleep_until(*self.look_at.get_or_insert_with(|| Instant::now() + LOOK)).await;
            self.look_at = None;
            let mut changed = false;
            for (file, value) in &mut self.files {
                let now = read(file);
                changed |= std::mem::replace(value, now) != now;
            }
            if changed {
                return;
            }
        }
    }
}

/// The file belongs to the namespace that it was opened in, wherever it is read.
fn read(file: &File) -> Value {
    let mut text = [0; LONGEST];
    let len = file.read_at(&mut text, 0).unwrap_or(0);
    (text, len)
}
