//! The manifests of a peering in many manifest_order, and both spellings of CIDRs.

use std::time::Instant;

use anyhow::{Context, Result};
use weft_tests::manifests::Spelling::{self, List, Text};
use weft_tests::wait_until;

use crate::pair::{Pair, SOON};
use crate::stage::note_time;

/// Manifests without the namespace, in which the others are.
const KINDS: [(usize, &str); 4] =
    [(1, "Configuration"), (2, "Secret"), (3, "PublicKey"), (4, "gateway")];
/// Rome's and milan's.
const SPELLINGS: [[Spelling; 2]; 5] =
    [[Text, Text], [List, Text], [Text, List], [List, List], [List, List]];

/// One manifest: whose it is, rome's or milan's, its place among theirs, and its name here.
type Manifest = (usize, (usize, &'static str));

/// Connects both sides by each order of the eight manifests, with a time limit, and parts them by
/// `part` between one and the next.
pub(crate) fn connect(pair: &Pair, part: impl Fn() -> Result<()>) -> Result<()> {
    for (i, (order, spellings)) in manifest_order().into_iter().zip(SPELLINGS).enumerate() {
        if i > 0 {
            part()?;
        }
        let began = Instant::now();
        let what = described(&order, spellings);
        in_order(pair, &order, spellings)
            .and_then(|()| pair.wait_connected(SOON.saturating_sub(began.elapsed())))
            .with_context(|| what.clone())?;
        note_time(began.elapsed(), &what);
        // Gateways may be connected before nodes have routes.
        wait_until("prefixes are remapped", SOON, || pair.views())?;
        pair.all_reach_all()?;
    }
    Ok(())
}

/// Every manifest comes first, and last, on each side; then one of chance.
fn manifest_order() -> Vec<Vec<Manifest>> {
    let rotated = (0..KINDS.len()).map(|n| {
        let mut rome = KINDS;
        rome.rotate_left(n);
        let milan = rome.into_iter().rev().map(|kind| (1, kind));
        let both = rome.into_iter().map(|kind| (0, kind)).zip(milan);
        both.flat_map(|(rome, milan)| if n % 2 == 0 { [rome, milan] } else { [milan, rome] })
            .collect::<Vec<_>>()
    });
    let mut orders: Vec<_> = rotated.collect();
    let mut by_chance = orders[0].clone();
    fastrand::shuffle(&mut by_chance);
    orders.push(by_chance);
    orders
}

/// One after the other.
fn in_order(pair: &Pair, order: &[Manifest], spellings: [Spelling; 2]) -> Result<()> {
    let documents = pair.documents_in(spellings);
    order.iter().try_for_each(|(side, (place, _))| {
        // While there is no webhook for a moment, strings are refused, and can be applied again.
        let apply = || pair.clusters[*side].apply(&documents[*side][*place]).map(drop);
        wait_until("it is taken", SOON, apply)
    })
}

fn described(order: &[Manifest], spellings: [Spelling; 2]) -> String {
    let names =
        order.iter().map(|(side, (_, name))| format!("{}'s {name}", ["rome", "milan"][*side]));
    format!("from {}; CIDRs as {spellings:?}", names.collect::<Vec<_>>().join(", "))
}
