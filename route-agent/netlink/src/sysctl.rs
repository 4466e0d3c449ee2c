use std::fs;

use netplan::Sysctl;

use crate::{NetlinkError, Netns};

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
