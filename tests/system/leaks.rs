//! ```text
//!   pod --- rome-1 ---[ switch: sees everything  ]--- milan-1 --- pod
//! ```
//! One node each, so that no overlay packet is on the wire either.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use weft_tests::Pod;
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::udp_echo;

use crate::scene::{ECHO, PORT, TIMEOUT, first_pod, play, rome_and_milan, serve};

const MARK: &[u8] = b"this must never be seen in the clear";

#[test]
fn lost_tunnel_leaks_nothing_by_default_route() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let counts = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
        let [tunnel, leaked] = counts.clone();
        let capture = scene.lab.capture(move |frame| {
            tunnel.fetch_add(usize::from(udp_port(frame) == Some(PORT)), Ordering::Relaxed);
            let marked = frame.windows(MARK.len()).any(|window| window == MARK);
            leaked.fetch_add(usize::from(marked), Ordering::Relaxed);
        })?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let peering = Peering::new(&rome.spec, &milan.spec, PORT);
        rome.apply("milan", &join(&peering.client_documents()))?;
        weft_tests::wait_until("rome sees milan somewhere", TIMEOUT, || rome.view(&milan.spec))?;
        let (pod, target) = scene.way("rome", "milan")?;
        shout(&pod, target)?;

        milan.apply("rome", &join(&peering.server_documents()))?;
        rome.wait_connected("milan", TIMEOUT)?;
        milan.wait_connected("rome", TIMEOUT)?;
        let _servers = serve(first_pod(milan))?;
        udp_echo(&pod.ns, SocketAddr::new(target, ECHO), MARK)?;

        for gateway in rome.processes(0, "gateway") {
            let pid = nix::unistd::Pid::from_raw(gateway);
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL)?;
        }
        shout(&pod, target)?;
        milan.apply("gone", "")?;
        rome.remove("milan")?;
        std::thread::sleep(Duration::from_millis(300));

        capture.finish()?;
        let [tunnel, leaked] = counts.map(|count| count.load(Ordering::Relaxed));
        ensure!(tunnel > 4, "the capture saw only {tunnel} packets of the tunnel");
        ensure!(leaked == 0, "{leaked} frames carried the text in clear");
        Ok(())
    })
}

/// Sends the marked text a few times; whether anything answers does not matter.
fn shout(pod: &Pod, target: IpAddr) -> Result<()> {
    let socket = pod.ns.run(|| UdpSocket::bind("0.0.0.0:0"))?;
    for _ in 0..40 {
        let _ = socket.send_to(MARK, (target, ECHO));
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Destination port of an IPv4 UDP packet in an Ethernet frame.
fn udp_port(frame: &[u8]) -> Option<u16> {
    let is_udp = frame.get(12..14)? == [8, 0] && *frame.get(23)? == 17;
    is_udp.then(|| Some(u16::from_be_bytes([*frame.get(36)?, *frame.get(37)?]))).flatten()
}
