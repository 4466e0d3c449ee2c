//! ```text
//!   pod --- rome-1 (gateway) -----/ /---- milan-1 (not there yet, or cut off)
//!   pod --- rome-2           -----/
//! ```

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::{Service, TcpServer, connect};
use weft_tests::{ClusterSpec, Netns, wait_until};

use crate::scene::{ECHO, HTTP, PORT, Scene, TIMEOUT, first_pod, play, rome_and_milan, serve};

/// From the loss of a gateway until its peer is refused, long before its Connection reports Error.
const LOST: Duration = Duration::from_secs(5);

#[test]
fn peer_that_never_connected_resets_connections() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let peering = Peering::new(&rome.spec, &milan.spec, PORT);
        rome.apply("milan", &join(&peering.client_documents()))?;
        wait_until("rome sees milan somewhere", TIMEOUT, || rome.view(&milan.spec))?;
        let (pod, target) = scene.way("rome", "milan")?;
        wait_until("the node knows the peer", TIMEOUT, || refused(&pod.ns, target))?;
        for _ in 0..20 {
            refused(&pod.ns, target)?;
            refused(rome.head().net(), target)?;
        }
        Ok(())
    })
}

/// Files that the agent of rome-2 reads stay readable, as where the published directory is a copy.
#[test]
fn lost_gateway_is_refused_and_cuts_no_connection() -> Result<()> {
    play(&rome_and_milan(2).map(ClusterSpec::dual_stack), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let (pod, server) = (&rome.nodes[1].pods[0], first_pod(milan));
        let view = rome.view(&milan.spec)?;
        let targets: Vec<_> =
            server.addresses.iter().map(|address| view.of(*address)).collect::<Result<_>>()?;
        let _servers = serve(server)?;
        let _echo = TcpServer::start(&server.ns, ECHO, Service::Echo)?;
        let opens = |target| {
            connect(&pod.ns, SocketAddr::new(target, HTTP), Duration::from_millis(300)).map(drop)
        };
        for target in &targets {
            wait_until("rome-2 reaches the peer", TIMEOUT, || opens(*target))?;
        }
        let to = SocketAddr::new(targets[0], ECHO);
        let mut held = connect(&pod.ns, to, Duration::from_secs(2))?;
        echoes(&mut held)?;
        survives_a_restart(scene)?;
        echoes(&mut held).context("after a restart of the gateway")?;

        scene.lab.cut("rome-1")?;
        let cut = Instant::now();
        for target in &targets {
            wait_until("rome-2 refuses the peer", LOST, || {
                let kind = opens(*target).err().map(|error| error.kind());
                ensure!(kind == Some(ErrorKind::ConnectionRefused), "it ended in {kind:?}");
                Ok::<_, anyhow::Error>(())
            })?;
        }
        ensure!(cut.elapsed() < LOST, "refused after {:?}", cut.elapsed());
        eprintln!("refused {:?} after the gateway was lost", cut.elapsed());
        scene.lab.restore("rome-1")?;
        for target in &targets {
            wait_until("rome-2 reaches the peer again", TIMEOUT, || opens(*target))?;
        }
        echoes(&mut held).context("after the gateway was lost")
    })
}

/// Kills the gateway, which is back before it counts as lost.
fn survives_a_restart(scene: &Scene) -> Result<()> {
    let rome = scene.cluster("rome");
    for pid in rome.processes(0, "gateway") {
        kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    }
    std::thread::sleep(LOST);
    let log = rome.nodes[1].host.outside("/run/agent-2/log/route-agent-rome-2.log");
    let log = std::fs::read_to_string(log)?;
    ensure!(!log.contains("refused until the peer's gateway answers"), "{log}");
    Ok(())
}

fn echoes(stream: &mut TcpStream) -> Result<()> {
    const TEXT: &[u8] = b"still here";
    let mut answer = [0; TEXT.len()];
    stream.write_all(TEXT)?;
    stream.read_exact(&mut answer)?;
    ensure!(answer == TEXT, "the echo is {answer:?}");
    Ok(())
}

/// Fails unless a connection is refused, and that without delay.
fn refused(ns: &Netns, target: IpAddr) -> Result<()> {
    let start = Instant::now();
    match connect(ns, SocketAddr::new(target, HTTP), Duration::from_secs(2)) {
        Ok(_) => bail!("it was accepted"),
        Err(error) => ensure!(error.kind() == ErrorKind::ConnectionRefused, "{error}"),
    }
    ensure!(start.elapsed() < Duration::from_millis(200), "it took {:?}", start.elapsed());
    Ok(())
}
