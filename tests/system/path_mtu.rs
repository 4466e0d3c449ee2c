//! ```text
//!   pod (9000) --- rome-1 (9000) --- port [ switch ] port (1100 to 9000) --- (9000) milan-1 --- pod
//! ```
//!
//! The switch drops what does not fit a port, and rome gets no ICMP: it can only try. Milan
//! does where there is any (a bridge that looks into IPv6 sends some), which makes no difference.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::{PingError, Pinger, paced_bulk};
use weft_tests::{ClusterSpec, Netns, Pod, wait_until};

use crate::scene::{ECHO, PORT, SINK, Scene, TIMEOUT, first_pod, play, rome_and_milan, serve};

/// Time within which a path that changed under traffic has to be known again.
const FOUND: Duration = Duration::from_secs(2);
/// Time within which a fault is named, and a solved one is gone.
const NAMED: Duration = Duration::from_secs(3);
/// Size of one transfer, in bytes.
const TRANSFER: u64 = 10_000_000;
/// Makes a transfer take some four seconds.
const PACE: Duration = Duration::from_millis(100);

const FILTER: &str = "table inet filter {
  chain input {
    type filter hook input priority -300;
    iifname eth0 icmp type destination-unreachable drop
    iifname eth0 icmpv6 type packet-too-big drop
  }
}
";

#[test]
fn ipv4_path_mtu_is_found_and_followed() -> Result<()> {
    any_path(rome_and_milan(1).map(ClusterSpec::dual_stack), 60, &[1500, 1280, 9000, 1340])
}

#[test]
fn ipv6_path_mtu_is_found_and_followed() -> Result<()> {
    let specs = rome_and_milan(1).map(|spec| spec.dual_stack().on_ipv6());
    any_path(specs, 80, &[1360, 1500, 1280, 9000])
}

#[test]
fn ipv4_path_below_1280_is_followed_to_the_byte() -> Result<()> {
    play(&rome_and_milan(1).map(ClusterSpec::dual_stack), |scene| {
        jumbo(scene)?;
        set_path(scene, 1400)?;
        peer(scene, "")?;
        wait_until("the path is known", TIMEOUT, || is_known(scene, 1400, 60))?;
        change_in_mid_flow(scene, 1100, || is_known(scene, 1100, 60))?;
        fits(scene, 1040)?;
        // What is larger is looked for every ten seconds.
        for width in [1279, 1500] {
            set_path(scene, width)?;
            wait_until("the wider path is known", TIMEOUT, || is_known(scene, width, 60))?;
            fits(scene, width - 60)?;
        }
        Ok(())
    })
}

#[test]
fn device_of_1270_at_one_end_is_found_by_the_other() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.cluster("milan").head().ip("link set dev eth0 mtu 1270\n")?;
        scene.lab.switch().ip("link set dev milan-1 mtu 1270\n")?;
        peer(scene, "")?;
        let found = || bound_of(scene.cluster("rome").peering("milan")?, 1210, "Path", 1270);
        wait_until("the other device is found", TIMEOUT, found)?;
        fits(scene, 1210)
    })
}

/// Only rome's tunnel is too small for IPv6; what milan's pods send still fits milan's.
#[test]
fn ipv6_refused_at_one_end_is_named_at_both() -> Result<()> {
    play(&rome_and_milan(1).map(ClusterSpec::dual_stack), |scene| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        peer(scene, "")?;
        let refusal = "rome refuses IPv6 to this cluster";
        let peering = Peering::new(&rome.spec, &milan.spec, PORT);
        let line = format!("  mtu: {}\n", peering.mtu);
        for (mtu, is_named) in [("  mtu: 1240\n", true), ("", false)] {
            rome.apply("milan", &join(&peering.client_documents()).replace(&line, mtu))?;
            for (cluster, text) in [(rome, "IPv6 to milan is refused"), (milan, refusal)] {
                wait_until("the refusal is named or gone", NAMED, || {
                    let problems = cluster.status()?["problems"].to_string();
                    ensure!(problems.contains(text) == is_named, "{is_named}: {problems}");
                    Ok(())
                })?;
            }
        }
        Ok(())
    })
}

/// From one width to the next in the midst of a transfer; at each one both families have the right
/// limit.
fn any_path(specs: [ClusterSpec; 2], overhead: u32, widths: &[u32]) -> Result<()> {
    play(&specs, |scene| {
        let [first, others @ ..] = widths else { bail!("no widths") };
        jumbo(scene)?;
        set_path(scene, *first)?;
        peer(scene, "")?;
        wait_until("the path is known", TIMEOUT, || is_known(scene, *first, overhead))?;
        fits(scene, first - overhead)?;
        for width in others {
            change_in_mid_flow(scene, *width, || is_known(scene, *width, overhead))?;
            fits(scene, width - overhead)?;
        }
        Ok(())
    })
}

/// Time until both sides had found the new width while transfers were running both ways, which
/// complete.
fn change_in_mid_flow(
    scene: &Scene,
    width: u32,
    mut is_known: impl FnMut() -> Result<()>,
) -> Result<Duration> {
    let ways = [("rome", "milan"), ("milan", "rome")].map(|(from, to)| {
        let (pod, target) = scene.way(from, to)?;
        let server = serve(first_pod(scene.cluster(to)))?;
        forget(&pod.ns)?;
        let to = SocketAddr::new(target, SINK);
        Ok((server, thread::spawn(move || paced_bulk(&pod.ns, to, TRANSFER, PACE))))
    });
    let transfers = ways.into_iter().collect::<Result<Vec<_>>>()?;
    thread::sleep(Duration::from_millis(500));
    let start = Instant::now();
    set_path(scene, width)?;
    wait_until("both sides know the new path", TIMEOUT, &mut is_known)?;
    let took = start.elapsed();
    eprintln!("{width} bytes found after {took:?}");
    for (_server, transfer) in transfers {
        let report = transfer.join().expect("a transfer does not panic");
        report.with_context(|| format!("a transfer while the path became {width} wide"))?;
    }
    ensure!(took <= FOUND, "{width} bytes were found after {took:?}");
    Ok(took)
}

#[test]
fn configured_mtu_is_upper_bound() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        jumbo(scene)?;
        peer(scene, "  mtu: 1400\n")?;
        let wanted = || bound_is(scene, 1400, "Spec", 1460);
        wait_until("the user's bound is in force", TIMEOUT, wanted)?;
        change_in_mid_flow(scene, 1340, || bound_is(scene, 1280, "Path", 1340))?;
        change_in_mid_flow(scene, 9000, wanted).map(drop)
    })
}

#[test]
fn looking_at_an_idle_path_costs_next_to_nothing() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        jumbo(scene)?;
        set_path(scene, 1500)?;
        peer(scene, "")?;
        wait_until("the path is known", TIMEOUT, || is_known(scene, 1500, 60))?;
        let sent = || -> Result<u64> {
            let host = scene.cluster("rome").head();
            let text = host
                .command(Command::new("cat").arg("/sys/class/net/eth0/statistics/tx_bytes"), "")?;
            Ok(text.trim().parse()?)
        };
        let (before, time) = (sent()?, Duration::from_secs(12));
        thread::sleep(time);
        let rate = (sent()? - before) / time.as_secs();
        eprintln!("{rate} bytes/s on an idle underlay");
        // 300 of it are the path's, the rest are eight probes and their answers every two seconds: with
        // fewer, loss would not be seen within three.
        ensure!(rate < 2500, "{rate} bytes/s on an idle underlay");
        Ok(())
    })
}

#[test]
fn device_mtu_bounds_tunnel_and_is_followed() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        peer(scene, "")?;
        wait_until("the device bounds", TIMEOUT, || bound_is(scene, 1440, "Device", 1500))?;
        jumbo(scene)?;
        wait_until("more fits", TIMEOUT, || bound_is(scene, 8940, "Device", 9000))?;
        for cluster in &scene.clusters {
            cluster.head().ip("link set dev eth0 mtu 1400\n")?;
        }
        wait_until("less fits", TIMEOUT, || bound_is(scene, 1340, "Device", 1400))
    })
}

/// All that machines and pods have takes 9,000 bytes, and so do the switch's ports. Machines cut
/// trains themselves, or the switch would let them pass whole.
fn jumbo(scene: &Scene) -> Result<()> {
    for cluster in &scene.clusters {
        let name = cluster.head().name();
        scene.lab.switch().ip(&format!("link set dev {name} mtu 9000\n"))?;
        let devices = ["eth0", "cni0", "veth1"].map(|dev| format!("link set dev {dev} mtu 9000\n"));
        cluster.head().ip(&devices.concat())?;
        cluster.head().ip("link set dev eth0 gso_max_segs 1\n")?;
        first_pod(cluster).ns.ip("link set dev eth0 mtu 9000\n")?;
    }
    scene.cluster("rome").head().net().nft(FILTER)
}

/// The switch drops what is larger where it leaves it.
fn set_path(scene: &Scene, bytes: u32) -> Result<()> {
    for cluster in &scene.clusters {
        let port = cluster.head().name();
        scene.lab.switch().ip(&format!("link set dev {port} mtu {bytes}\n"))?;
    }
    Ok(())
}

/// `mtu` is that line of the manifests, or empty.
fn peer(scene: &Scene, mtu: &str) -> Result<()> {
    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let peering = Peering::new(&rome.spec, &milan.spec, PORT);
    let line = format!("  mtu: {}\n", peering.mtu);
    let edit = |documents: &[String]| join(documents).replace(&line, mtu);
    rome.apply("milan", &edit(&peering.client_documents()))?;
    milan.apply("rome", &edit(&peering.server_documents()))?;
    rome.wait_connected("milan", TIMEOUT)?;
    milan.wait_connected("rome", TIMEOUT)
}

/// Both sides have found this width.
fn is_known(scene: &Scene, width: u32, overhead: u32) -> Result<()> {
    // The largest is the machines' own.
    let bound = if width == 9000 { "Device" } else { "Path" };
    bound_is(scene, width - overhead, bound, width)
}

fn bound_is(scene: &Scene, mtu: u32, bound: &str, path: u32) -> Result<()> {
    for (id, peer) in [("rome", "milan"), ("milan", "rome")] {
        bound_of(scene.cluster(id).peering(peer)?, mtu, bound, path).context(id)?;
    }
    Ok(())
}

fn bound_of(found: Value, mtu: u32, bound: &str, path: u32) -> Result<()> {
    let all = (found["mtu"].as_u64(), found["mtuBound"].as_str(), found["pathMtu"].as_u64());
    ensure!(all == (Some(mtu.into()), Some(bound), Some(path.into())), "{found}");
    Ok(())
}

/// Packets of `limit` bytes pass between the pods, and senders of larger ones are notified. IPv6
/// needs 1,280.
fn fits(scene: &Scene, limit: u32) -> Result<()> {
    let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
    let view = rome.view(&milan.spec)?;
    let pod = first_pod(rome);
    for real in &first_pod(milan).addresses {
        let to = view.of(*real)?;
        if to.is_ipv6() && limit < 1280 {
            let says = rome.status()?["problems"].to_string();
            ensure!(
                says.contains("less than the 1280 that IPv6 needs"),
                "nothing says that IPv6 does not fit: {says}"
            );
            continue;
        }
        // Routes of the nodes follow a moment later.
        wait_until("the limit is in force", TIMEOUT, || limit_is(pod, to, limit))?;
        wait_until("UDP gets an error", TIMEOUT, || udp_gets_icmp(pod, to, limit))?;
    }
    Ok(())
}

fn limit_is(pod: &Pod, to: IpAddr, limit: u32) -> Result<()> {
    let pinger = Pinger::new(&pod.ns, to)?;
    let headers = if to.is_ipv4() { 28 } else { 48 };
    let payload = usize::try_from(limit)? - headers;
    let wait = Duration::from_secs(1);
    let fits = pinger.echo(1, payload, wait)?;
    ensure!(fits.is_ok(), "{limit} bytes to {to}: {fits:?}");
    if limit < 9000 {
        let over = pinger.echo(2, payload + 1, wait)?;
        ensure!(over == Err(PingError::TooBig { mtu: limit }), "{} bytes: {over:?}", limit + 1);
    }
    Ok(())
}

/// A datagram one byte too long, not to be fragmented: from then on the kernel knows the limit.
#[allow(unsafe_code)]
fn udp_gets_icmp(pod: &Pod, to: IpAddr, limit: u32) -> Result<()> {
    forget(&pod.ns)?;
    let socket = open_udp(&pod.ns, to)?;
    let (level, discover, always, mtu) = match to {
        IpAddr::V4(_) => {
            (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO, libc::IP_MTU)
        }
        IpAddr::V6(_) => {
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO, libc::IPV6_MTU)
        }
    };
    let (mut known, mut size) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    let fd = socket.as_raw_fd();
    // SAFETY: `always` is an int that outlives the call, and its size is given.
    let set = unsafe { libc::setsockopt(fd, level, discover, (&raw const always).cast(), size) };
    ensure!(set == 0, "setting DF: {}", std::io::Error::last_os_error());
    let headers = if to.is_ipv4() { 28 } else { 48 };
    let payload = vec![0; usize::try_from(limit)? - headers + 1];
    // Refused here if the route knows already.
    let _ = socket.send(&payload);
    thread::sleep(Duration::from_millis(50));
    // SAFETY: the kernel writes one int and its size to places that outlive the call.
    let got = unsafe { libc::getsockopt(fd, level, mtu, (&raw mut known).cast(), &raw mut size) };
    ensure!(got == 0, "reading the MTU: {}", std::io::Error::last_os_error());
    ensure!(known == i32::try_from(limit)?, "the pod believes in {known} bytes, not {limit}");
    Ok(())
}

/// A pod caches for ten minutes the path MTU that it was notified of.
fn forget(pod: &Netns) -> Result<()> {
    ["-4", "-6"].into_iter().try_for_each(|family| {
        pod.command(Command::new("ip").args([family, "route", "flush", "cache"]), "").map(drop)
    })
}

fn open_udp(ns: &Netns, to: IpAddr) -> Result<UdpSocket> {
    let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
    let socket = ns.run(|| UdpSocket::bind((any, 0)))?;
    socket.connect((to, ECHO))?;
    Ok(socket)
}
