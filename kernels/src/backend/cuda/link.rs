//! How fast the link between the card and pinned host memory is, measured.

use std::sync::Arc;

use super::driver::{Context, DeviceMemory, Event, Pinned, Result, Stream};
use crate::Link;

/// Bytes of a copy: enough that starting it takes no part of its time that counts.
const BYTES: usize = 16 << 20;
/// Copies of a measurement, one behind the other.
const COPIES: usize = 4;
/// Measurements, of which the median is taken.
const RUNS: usize = 3;

/// One direction.
struct Way {
    out: bool,
    stream: Stream,
    device: DeviceMemory,
    host: Pinned,
    start: Event,
    end: Event,
}

impl Way {
    fn new(context: &Arc<Context>, out: bool) -> Result<Self> {
        let way = Way {
            out,
            stream: Stream::new(context)?,
            device: DeviceMemory::new(context, BYTES)?,
            host: Pinned::new(context, BYTES)?,
            start: Event::new(context, true)?,
            end: Event::new(context, true)?,
        };
        // SAFETY: memory of that length.
        unsafe { way.stream.set(way.device.start, 0, BYTES) }?;
        Ok(way)
    }

    fn queue(&self) -> Result<()> {
        self.start.record(&self.stream)?;
        for _ in 0..COPIES {
            let host = self.host.start.as_ptr();
            // SAFETY: both are of that length, and used by this stream alone, which is waited for before they go.
            unsafe {
                match self.out {
                    true => self.stream.copy_to_host(host, self.device.start, BYTES),
                    false => self.stream.copy_to_device(self.device.start, host, BYTES),
                }
            }?;
        }
        self.end.record(&self.stream)
    }

    /// Bytes a second of what was queued.
    fn rate(&self) -> Result<f64> {
        self.end.synchronize()?;
        Ok((COPIES * BYTES) as f64 / self.end.seconds_since(&self.start)?)
    }
}

impl Drop for Way {
    /// Nothing is queued any more when the memory goes.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

/// Both directions, alone and together.
pub(super) fn probe(context: &Arc<Context>) -> Result<Link> {
    context.bind()?;
    let (out, back) = (Way::new(context, true)?, Way::new(context, false)?);
    let mut found = [const { Vec::new() }; 4];
    for _ in 0..RUNS {
        for (ways, at) in [(&[&out][..], 0), (&[&back][..], 1), (&[&out, &back][..], 2)] {
            ways.iter().try_for_each(|way| way.queue())?;
            for (way, found) in ways.iter().zip(&mut found[at..]) {
                found.push(way.rate()?);
            }
        }
    }
    let [out_bytes, in_bytes, out_together_bytes, in_together_bytes] = found.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    Ok(Link { out_bytes, in_bytes, out_together_bytes, in_together_bytes })
}
