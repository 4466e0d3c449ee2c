//! Config as it is published: in whole, or the gateway's own part of it and GatewayRecords.

use fabric_api::fabric::{GatewayConfig, GatewayRecord, RecordVersion, Records};
use fabric_store::Event;

/// Objects that the store has reported.
#[derive(Debug, Default)]
pub(super) struct Published {
    pub(super) config: Option<GatewayConfig>,
    records: Records<GatewayRecord>,
    are_records_listed: bool,
}

impl Published {
    /// Returns true if the records may be others now, or are known to be all.
    pub(super) fn take_record(&mut self, event: Event) -> bool {
        match event {
            Event::Applied(object) => {
                let record = GatewayRecord::try_from(object);
                record.map(|record| self.records.insert(record)).is_ok()
            }
            Event::Deleted(gone) => {
                self.records.remove(&gone.name);
                true
            }
            Event::Synced => {
                self.are_records_listed = true;
                true
            }
            Event::Problems(_) => false,
        }
    }

    /// Config in whole; `None` while records are missing.
    pub(super) fn joined(&self) -> Option<GatewayConfig> {
        self.config.as_ref()?.joined(&self.records)
    }

    /// Version of the records, if all of it are there.
    pub(super) fn version(&self) -> Option<RecordVersion> {
        self.records.version()
    }

    /// True if the config is there, and neither whole nor waiting for records that are being listed.
    pub(super) fn lacks_records(&self) -> bool {
        self.config.is_some() && self.are_records_listed && self.joined().is_none()
    }

    /// True if the config is published in whole, as to a gateway that is not known to read records.
    pub(super) fn is_whole(&self) -> bool {
        self.config.as_ref().is_some_and(|config| !config.spec.from_records)
    }
}

#[cfg(test)]
mod tests;
