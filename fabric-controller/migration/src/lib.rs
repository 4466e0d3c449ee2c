//! A cluster's way from Liqo's network to weft and away from weft: [`adoption`] is `weft adopt`, [`withdrawal`]
//! what `weft down` is elsewhere, and [`unserved`] has Events at objects of Liqo's that weft does not apply.
//!
//! Each plans from what is there, so that an interrupted run is continued by the next one.

pub mod adoption;
mod liqo_networking;
pub mod unserved;
pub mod withdrawal;
