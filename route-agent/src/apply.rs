//! Brings the kernel to a state.

use fabric_runtime::chain;
use netlink::Handle;
use netplan::{State, plan};

use crate::names;

/// Number of steps attempted, and the problems met.
pub(crate) struct Applied {
    pub(crate) steps: usize,
    pub(crate) problems: Vec<String>,
}

/// Brings what is ours to `want`.
pub(crate) async fn apply(handle: &Handle, want: &State) -> Applied {
    let have = match handle.observe(&names::scope(want.sysctls.keys().cloned())).await {
        Ok(have) => have,
        Err(error) => {
            let problem = format!("cannot read the kernel's tables: {}", chain(&error));
            return Applied { steps: 0, problems: vec![problem] };
        }
    };
    let steps = plan(&have, want);
    if !steps.is_empty() {
        tracing::info!(steps = steps.len(), "changing the kernel's tables");
    }
    let failures = handle.apply(&steps).await;
    let problems = failures.iter().map(|failure| chain(failure)).collect();
    Applied { steps: steps.len(), problems }
}
