//! Packets that a line sends through each tunnel.

use std::time::Duration;

use crate::flow::Traffic;

/// Packets through each tunnel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// `None`: requests only.
    pub(crate) traffic: Option<Traffic>,
    /// Flows in each of the directions.
    pub(crate) flows: usize,
    pub(crate) direction: Direction,
    /// Requests from end a, with this pause after each response.
    pub(crate) requests: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    There,
    Back,
    Both,
}
