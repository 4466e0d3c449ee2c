use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use socket2::{Domain, Protocol, Socket, Type};

use crate::Netns;

/// How many bytes of each frame are kept, and how many frames.
const SNAP: usize = 256;
const MOST: usize = 200_000;

/// All frames that pass a namespace's devices while this value lives. A frame that passes several
/// devices is there several times.
pub struct Capture {
    frames: Arc<Mutex<Vec<Vec<u8>>>>,
    stop: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl Capture {
    pub fn start(ns: &Netns) -> Result<Self> {
        let every_protocol = i32::from(u16::to_be(libc::ETH_P_ALL as u16));
        let open = || Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(every_protocol)));
        let socket = ns.run(open).context("opening a packet socket")?;
        socket.set_read_timeout(Some(Duration::from_millis(20)))?;
        let _ = socket.set_recv_buffer_size(8 << 20);

        let frames = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (told, kept) = (Arc::clone(&stop), Arc::clone(&frames));
        let reader = std::thread::spawn(move || read(&socket, &told, &kept));
        Ok(Self { frames, stop, reader: Some(reader) })
    }

    /// How many frames so far satisfy `wanted`.
    pub fn count(&self, wanted: impl Fn(&[u8]) -> bool) -> usize {
        let frames = self.frames.lock().expect("the reader does not panic");
        frames.iter().filter(|frame| wanted(frame)).count()
    }

    /// How many frames so far contain these bytes.
    pub fn containing(&self, bytes: &[u8]) -> usize {
        self.count(|frame| frame.windows(bytes.len()).any(|window| window == bytes))
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn read(socket: &Socket, stop: &AtomicBool, frames: &Mutex<Vec<Vec<u8>>>) {
    let mut buffer = [MaybeUninit::<u8>::uninit(); 65_536];
    while !stop.load(Ordering::Relaxed) {
        let Ok(len) = socket.recv(&mut buffer) else { continue };
        let frame = initialized(&buffer[..len.min(SNAP)]);
        let mut frames = frames.lock().expect("nobody panics while holding it");
        if frames.len() < MOST {
            frames.push(frame);
        }
    }
}

/// What `recv` has filled in.
#[allow(unsafe_code)]
pub(crate) fn initialized(bytes: &[MaybeUninit<u8>]) -> Vec<u8> {
    // SAFETY: callers pass only as much as the kernel says it has written.
    bytes.iter().map(|byte| unsafe { byte.assume_init() }).collect()
}
