//! Rules of the old packet filter (`iptables-legacy`), which notifies of no change.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;
use std::{fs, io};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use nix::time::{ClockId, clock_gettime};
use sha2::{Digest as _, Sha256};

use crate::Netns;

/// One of the two filters, with the layout of its entries (`ip_tables.h`, `ip6_tables.h`), in bytes.
struct Version {
    family: AddressFamily,
    level: i32,
    /// File with the names of the tables in use.
    names: &'static str,
    /// Place of an entry's length, 16 bits, and of its counters.
    length_at: usize,
    counters_at: usize,
}

const VERSIONS: [Version; 2] = [
    Version {
        family: AddressFamily::Inet,
        level: libc::IPPROTO_IP,
        names: "ip_tables_names",
        length_at: 90,
        counters_at: 96,
    },
    Version {
        family: AddressFamily::Inet6,
        level: libc::IPPROTO_IPV6,
        names: "ip6_tables_names",
        length_at: 142,
        counters_at: 152,
    },
];
const COUNTERS: usize = 16;
const NAME: usize = 32;

pub type Digest = [u8; 32];

/// Returns a digest of all rules and policies, without their counters, and the processor time that it took.
pub fn digest(netns: &Netns) -> io::Result<(Digest, Duration)> {
    let read = || {
        let began = processor_time()?;
        let mut digest = Sha256::new();
        VERSIONS.iter().try_for_each(|version| version.add(&mut digest))?;
        Ok((digest.finalize().into(), processor_time()?.saturating_sub(began)))
    };
    netns.run(read).map_err(io::Error::other)?
}

/// Processor time of this thread so far.
fn processor_time() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

impl Version {
    /// Adds the tables in use. To ask for another would make it.
    fn add(&self, digest: &mut Sha256) -> io::Result<()> {
        let names = fs::read_to_string(format!("/proc/thread-self/net/{}", self.names));
        let names = names.unwrap_or_default();
        if names.is_empty() {
            return Ok(());
        }
        let socket = socket(self.family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        for name in names.lines() {
            digest.update(name);
            self.add_entries(&self.read(&socket, name)?, digest);
        }
        Ok(())
    }

    /// Reads the entries of a table.
    fn read(&self, socket: &OwnedFd, name: &str) -> io::Result<Vec<u8>> {
        const GET_INFO: i32 = 64;
        const GET_ENTRIES: i32 = 65;
        /// Length of the answer, whose last word is the length of all entries.
        const INFO: usize = 84;
        /// Place of the entries, behind the name and their length.
        const ENTRIES: usize = 40;
        let too_long = || io::Error::other("a table's name is too long");
        let mut info = vec![0; INFO];
        info.get_mut(..name.len()).filter(|_| name.len() < NAME).ok_or_else(too_long)?;
        info[..name.len()].copy_from_slice(name.as_bytes());
        self.get(socket, GET_INFO, &mut info)?;
        let size = &info[INFO - 4..];
        let mut answer = [&info[..NAME], size].concat();
        let size = size.try_into().map(u32::from_ne_bytes).map_err(io::Error::other)?;
        answer.resize(ENTRIES + usize::try_from(size).map_err(io::Error::other)?, 0);
        self.get(socket, GET_ENTRIES, &mut answer)?;
        Ok(answer.split_off(ENTRIES))
    }

    fn get(&self, socket: &OwnedFd, option: i32, buffer: &mut [u8]) -> io::Result<()> {
        let mut length = libc::socklen_t::try_from(buffer.len()).map_err(io::Error::other)?;
        let at = buffer.as_mut_ptr().cast();
        // SAFETY: the kernel reads and writes at most `length` bytes, which the buffer has.
        #[allow(unsafe_code)]
        let result = unsafe {
            libc::getsockopt(socket.as_raw_fd(), self.level, option, at, &raw mut length)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn add_entries(&self, mut entries: &[u8], digest: &mut Sha256) {
        let length = |entry: &[u8]| {
            let length = entry.get(self.length_at..self.length_at + 2)?.try_into().ok()?;
            Some(usize::from(u16::from_ne_bytes(length)))
        };
        let counted_to = self.counters_at + COUNTERS;
        while let Some((entry, rest)) = length(entries)
            .filter(|of| *of >= counted_to)
            .and_then(|of| entries.split_at_checked(of))
        {
            digest.update(&entry[..self.counters_at]);
            digest.update(&entry[counted_to..]);
            entries = rest;
        }
    }
}
