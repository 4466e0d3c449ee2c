//! Simulated route-agents: each with a watch of its own, and without a kernel.

use std::time::{Duration, Instant};

use anyhow::Result;
use api_server::ApiServer;
use fabric_store::Store;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::board::Board;
use crate::manifests::node_name;
use crate::published::AgentView;
use crate::users::User;

/// Delay of a route-agent after its status could not be written.
const RETRY: Duration = Duration::from_secs(2);

/// Starts one agent a node.
pub(crate) fn start(
    server: &ApiServer,
    nodes: usize,
    board: &Board,
    tasks: &mut JoinSet<()>,
) -> Result<()> {
    for node in (0..nodes).map(node_name) {
        let (store, board) = (User::RouteAgent.store(server)?, board.clone());
        let view = AgentView::follow(&store, &node)?;
        tasks.spawn(run(store, view, node, board));
    }
    Ok(())
}

/// Acknowledges whatever was read last; what arrives during a write is acknowledged by the next one.
async fn run(store: Store, mut view: AgentView, node: String, board: Board) {
    loop {
        view.changed().await;
        while let Some(acknowledgement) = view.acknowledgement() {
            let peerings = view.peerings();
            match store.put_status(&acknowledgement).await {
                Ok(_) => {
                    board.acknowledged(&node, &peerings, Instant::now());
                    break;
                }
                Err(error) if error.is_gone() => break,
                Err(error) => {
                    board.failed("route-agent", &error.into());
                    tokio::select! {
                        () = view.changed() => {}
                        () = sleep(RETRY) => {}
                    }
                }
            }
        }
    }
}
