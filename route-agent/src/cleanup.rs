use netlink::Handle;
use netplan::State;

use crate::agent::{apply, chain};
use crate::foreign;
use crate::table::Table;

/// Takes away all that is ours: a plan towards nothing. Returns what could not be done.
///
/// What others made is not touched, the gateways' host ends and their routes included.
pub(crate) async fn all(handle: &Handle, table: &mut Table) -> Vec<String> {
    let mut problems = apply(handle, &State::default()).await.problems;
    if let Err(error) = table.remove(handle.netns()) {
        problems.push(chain(&error));
    }
    if let Err(error) = foreign::ensure(handle.netns(), false) {
        problems.push(chain(&error));
    }
    problems
}
