//! UDP as a QUIC server sends it, in trains that the kernel cuts to datagrams, or datagram by
//! datagram. Every datagram begins with its sequence number.

use std::io::{self, ErrorKind, IoSlice};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, MultiHeaders, sendmmsg, setsockopt, sockopt};

use super::Arrived;
use super::sequence::{Arrival, Sequence};

/// Longest payload of a UDP datagram over IPv4 in bytes, hence of a train.
const MAX_TRAIN: usize = 65_507;
/// Most datagrams of a train, in kernels before 6.5.
const MAX_SEGMENTS: usize = 64;
/// Messages of one `sendmmsg`: trains, and single datagrams.
const TRAINS: usize = 2;
const SINGLES: usize = 32;
/// Bytes of a sequence number.
const NUMBER: usize = 8;
/// Receive buffer of the sink in bytes: what it loses should be the tunnel's.
const RECEIVE_BUFFER: usize = 8 << 20;

pub(super) struct Sender {
    socket: UdpSocket,
    /// Bytes of a datagram, of a message, and of all messages of one call.
    datagram: usize,
    message: usize,
    buffer: Vec<u8>,
    next: u64,
}

impl Sender {
    /// Must be called in the namespace of the sender. `segmented`: with `UDP_SEGMENT`.
    pub(super) fn connect(
        from: IpAddr,
        to: SocketAddr,
        datagram: usize,
        segmented: bool,
    ) -> Result<Self> {
        let socket = UdpSocket::bind((from, 0)).context("binding")?;
        socket.connect(to).with_context(|| format!("connecting to {to}"))?;
        let (message, messages) = match segmented {
            true => ((MAX_TRAIN / datagram).min(MAX_SEGMENTS) * datagram, TRAINS),
            false => (datagram, SINGLES),
        };
        if segmented {
            setsockopt(&socket, sockopt::UdpGsoSegment, &(datagram as i32))
                .context("switching UDP_SEGMENT on")?;
        }
        Ok(Self { socket, datagram, message, buffer: vec![0; messages * message], next: 0 })
    }

    /// Sends as many messages as one call takes; returns their bytes. A full queue is `WouldBlock`.
    pub(super) fn send(&mut self) -> io::Result<usize> {
        let numbers = self.next..;
        for (number, datagram) in numbers.zip(self.buffer.chunks_exact_mut(self.datagram)) {
            datagram[..NUMBER].copy_from_slice(&number.to_be_bytes());
        }
        let messages: Vec<_> =
            self.buffer.chunks_exact(self.message).map(|bytes| [IoSlice::new(bytes)]).collect();
        let to = vec![None::<()>; messages.len()];
        let mut headers = MultiHeaders::preallocate(messages.len(), None);
        let fd = self.socket.as_raw_fd();
        let sent = match sendmmsg(fd, &mut headers, &messages, to, [], MsgFlags::empty()) {
            Err(Errno::ENOBUFS) => return Err(ErrorKind::WouldBlock.into()),
            sent => sent?.count() * self.message,
        };
        self.next += (sent / self.datagram) as u64;
        Ok(sent)
    }
}

/// Receives trains as trains, and checks each datagram's number.
pub(super) struct Sink {
    socket: UdpSocket,
    datagram: usize,
    sequence: Sequence,
    buffer: Vec<u8>,
}

impl Sink {
    /// Must be called in the namespace of the sink.
    pub(super) fn bind(address: IpAddr, datagram: usize) -> Result<Self> {
        let socket = UdpSocket::bind((address, 0)).with_context(|| format!("binding {address}"))?;
        setsockopt(&socket, sockopt::UdpGroSegment, &true).context("switching UDP_GRO on")?;
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).context("receive buffer")?;
        Ok(Self { socket, datagram, sequence: Sequence::new(), buffer: vec![0; 1 << 16] })
    }

    pub(super) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    pub(super) fn receive(&mut self) -> io::Result<Arrived> {
        let length = self.socket.recv(&mut self.buffer)?;
        let mut arrived = Arrived::default();
        for datagram in self.buffer[..length].chunks(self.datagram) {
            let Some(number) = datagram.first_chunk() else { continue };
            match self.sequence.observe(u64::from_be_bytes(*number)) {
                Arrival::Duplicate => arrived.duplicates += 1,
                Arrival::Reordered => {
                    arrived.reordered += 1;
                    arrived.bytes += datagram.len();
                }
                Arrival::InOrder => arrived.bytes += datagram.len(),
            }
        }
        Ok(arrived)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATAGRAM: usize = 64;

    fn receive_all(sink: &mut Sink, datagrams: usize) -> Arrived {
        sink.socket.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        let mut sum = Arrived::default();
        while sum.bytes / DATAGRAM + (sum.duplicates as usize) < datagrams {
            let some = sink.receive().unwrap();
            sum.bytes += some.bytes;
            sum.duplicates += some.duplicates;
            sum.reordered += some.reordered;
        }
        sum
    }

    #[test]
    fn sink_counts_injected_duplicates_and_reordering() {
        let mut sink = Sink::bind([127, 0, 0, 1].into(), DATAGRAM).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        // 4 is lost, 1 arrives late, 3 twice.
        for number in [0_u64, 2, 3, 1, 3, 5] {
            let mut datagram = [0; DATAGRAM];
            datagram[..NUMBER].copy_from_slice(&number.to_be_bytes());
            sender.send_to(&datagram, sink.socket.local_addr().unwrap()).unwrap();
        }
        let arrived = receive_all(&mut sink, 6);
        assert_eq!(arrived, Arrived { bytes: 5 * DATAGRAM, duplicates: 1, reordered: 1 });
    }

    #[test]
    fn sender_numbers_every_datagram_once() {
        for segmented in [false, true] {
            let mut sink = Sink::bind([127, 0, 0, 1].into(), DATAGRAM).unwrap();
            let to = sink.socket.local_addr().unwrap();
            let mut sender =
                Sender::connect([127, 0, 0, 1].into(), to, DATAGRAM, segmented).unwrap();
            let sent = sender.send().unwrap() + sender.send().unwrap();
            let arrived = receive_all(&mut sink, sent / DATAGRAM);
            assert_eq!(arrived, Arrived { bytes: sent, ..Arrived::default() }, "{segmented}");
            assert_eq!(sender.next, (sent / DATAGRAM) as u64);
        }
    }
}
