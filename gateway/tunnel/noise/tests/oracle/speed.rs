//! Cost of a packet beside boringtun, in one process and in turns.

use std::time::Instant;

use super::*;

/// Packets of a turn, and turns of each.
const PACKETS: u32 = 2000;
const TURNS: usize = 200;

/// Nanoseconds for each packet of a turn.
fn time(mut packet: impl FnMut()) -> f64 {
    #[expect(clippy::disallowed_methods, reason = "it measures")]
    let start = Instant::now();
    (0..PACKETS).for_each(|_| packet());
    #[expect(clippy::disallowed_methods, reason = "it measures")]
    let elapsed = start.elapsed();
    elapsed.as_nanos() as f64 / f64::from(PACKETS)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints both medians, and that of the ratios of neighbours.
fn report(what: &str, [ours, theirs]: [Vec<f64>; 2]) {
    let ratio = median(ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect());
    let (ours, theirs) = (median(ours), median(theirs));
    eprintln!("{what}: {ours:.0} ns, boringtun {theirs:.0} ns, ratio {ratio:.3}");
}

/// `cargo test --release -p noise -- --ignored --nocapture sealing_and_opening`
#[test]
#[ignore = "measures"]
fn sealing_and_opening() {
    for len in [20, 64, 128, 512, 1280, 1420] {
        let mut scene = Scene::new();
        let initiation = scene.initiate(1);
        let answer = handled(&mut scene.tunn, &initiation).unwrap();
        let pair = scene.ours.complete(response(&answer), scene.now).unwrap().split();
        passes(&pair, &mut scene.tunn);
        let (sealer, opener) = pair;
        let mut packet = PACKET.to_vec();
        packet.resize(len, 0xab);
        packet[2..4].copy_from_slice(&(len as u16).to_be_bytes());
        let [mut a, mut b, mut d] = [(); 3].map(|()| vec![0; 2000]);
        let (mut sealing, mut opening) = ([vec![], vec![]], [vec![], vec![]]);
        for turn in 0..2 * TURNS {
            // A, B, B, A: what drifts hits both.
            let ours = matches!(turn % 4, 0 | 3);
            let mut both = 0.0;
            let sealed = time(|| match ours {
                true => _ = sealer.seal(&packet, len, &mut a),
                false => _ = scene.tunn.encapsulate(&packet, &mut a),
            });
            both += time(|| match ours {
                // Each opens what the other seals.
                true => {
                    scene.tunn.encapsulate(&packet, &mut b);
                    assert_eq!(opener.open(&mut b[..len + 32], len + 32)[0], Ok(len));
                }
                false => {
                    sealer.seal(&packet, len, &mut b);
                    let opened = scene.tunn.decapsulate(None, &b[..len + 32], &mut d);
                    assert!(matches!(opened, TunnResult::WriteToTunnelV4(..)));
                }
            });
            sealing[usize::from(!ours)].push(sealed);
            opening[usize::from(!ours)].push(both);
        }
        report(&format!("{len} B, seal"), sealing);
        report(&format!("{len} B, seal by the other and open"), opening);
    }
}
