//! Packets that pods send to a peer all the time, and those of them on the wire between machines in clear.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use weft_tests::{Capture, Carrier, Lab, Netns};

/// Pattern that `ping -p` sends behind its time.
const TEXT: &[u8] = &[0x5a; 32];
/// Port without a listener.
const PORT: u16 = 7009;
const PACE: Duration = Duration::from_millis(5);

/// Senders of [`TEXT`] that never stop, as long as this value exists.
pub(crate) struct Senders {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Senders {
    /// One for each pair of a namespace and an address.
    pub(crate) fn start(ways: &[(&Netns, IpAddr)]) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = ways.iter().map(|(from, to)| {
            let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = from.run(|| UdpSocket::bind(any)).context("opening a socket")?;
            let (stopped, to) = (Arc::clone(&stop), SocketAddr::new(*to, PORT));
            Ok(std::thread::spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    // To be refused is fine.
                    let _ = socket.send_to(TEXT, to);
                    std::thread::sleep(PACE);
                }
            }))
        });
        let threads = threads.collect::<Result<_>>()?;
        Ok(Self { stop, threads })
    }
}

impl Drop for Senders {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

/// Frames on the switch that have [`TEXT`]: in clear, and in VXLAN between machines of a cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) wrapped: u64,
    /// Errors about VXLAN that quote it, which hosts without weft send.
    pub(crate) quoted: u64,
    pub(crate) frames: u64,
    pub(crate) bytes: usize,
    pub(crate) first: Option<Instant>,
    pub(crate) last: Option<Instant>,
}

pub(crate) struct Observer {
    seen: Arc<Mutex<Seen>>,
    capture: Capture,
}

impl Observer {
    pub(crate) fn start(lab: &Lab) -> Result<Self> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (counted, machines) = (Arc::clone(&seen), lab.machines());
        let capture = lab.capture(move |frame| {
            // All of it is in small frames.
            if frame.len() >= 300 || !frame.windows(TEXT.len()).any(|part| part == TEXT) {
                return;
            }
            let (mut seen, now) = (locked(&counted), Instant::now());
            match machines.carrier(frame) {
                Some(Carrier::Vxlan) => seen.wrapped += 1,
                Some(Carrier::Error) => seen.quoted += 1,
                None => {
                    seen.frames += 1;
                    seen.bytes += frame.len();
                    seen.first.get_or_insert(now);
                    seen.last = Some(now);
                }
            }
        })?;
        Ok(Self { seen, capture })
    }

    pub(crate) fn so_far(&self) -> Seen {
        locked(&self.seen).clone()
    }

    /// Fails if a frame was missed.
    pub(crate) fn finish(self) -> Result<Seen> {
        self.capture.finish()?;
        Ok(locked(&self.seen).clone())
    }
}

fn locked(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}
