//! What a stream's time went to, by the device's clock.
//!
//! Timed events mark where a queue comes to a wait, is past it, and has nothing more to do as far as the host knows. Between them it
//! ran, or stood still for another stream. Kernels between two waits are timed together, so what the queue lacked meanwhile, because
//! the host was late, counts as run. A copy is timed alone.

use std::{collections::BTreeMap, collections::VecDeque, sync::Arc, time::Duration};

use super::driver::{Context, Event, Result, Stream};

/// Spans that are let pile up before the device is asked about them.
const MOST_SPANS: usize = 256;

/// Seconds that a stream ran, and that it waited, by the number of the stream waited for.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub(super) busy: f64,
    pub(super) waited: BTreeMap<usize, f64>,
}

impl Totals {
    /// `None` is the stream itself.
    pub(super) fn add(&mut self, on: Option<usize>, time: Duration) {
        *on.map_or(&mut self.busy, |on| self.waited.entry(on).or_default()) += time.as_secs_f64();
    }
}

/// Of one queue of the driver's.
pub(super) struct Times {
    context: Arc<Context>,
    spans: VecDeque<Span>,
    /// Where the span begins that is not over.
    open: Option<Arc<Event>>,
    /// Whether the queue was given anything since.
    has_work: bool,
    spare: Vec<Event>,
    totals: Totals,
}

struct Span {
    /// What the queue waited for; `None` where it ran.
    on: Option<usize>,
    start: Arc<Event>,
    end: Arc<Event>,
}

impl Times {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        Times {
            context: context.clone(),
            spans: VecDeque::new(),
            open: None,
            has_work: false,
            spare: Vec::new(),
            totals: Totals::default(),
        }
    }

    /// Before the queue is given an op.
    pub(super) fn begin(&mut self, stream: &Stream) -> Result<()> {
        if self.open.is_none() {
            self.open = Some(self.mark(stream)?);
        }
        self.has_work = true;
        Ok(())
    }

    /// Before the queue is given a wait.
    pub(super) fn before_wait(&mut self, stream: &Stream) -> Result<()> {
        if self.open.is_none() || self.has_work {
            self.cut(stream, None)?;
        }
        Ok(())
    }

    /// After it; `None` for a wait for what the stream itself has under way.
    pub(super) fn after_wait(&mut self, stream: &Stream, on: Option<usize>) -> Result<()> {
        match on {
            Some(_) => self.cut(stream, on),
            None => {
                self.open = Some(self.mark(stream)?);
                Ok(())
            }
        }
    }

    /// After the last op that the host has for now.
    pub(super) fn end(&mut self, stream: &Stream) -> Result<()> {
        if self.has_work {
            self.cut(stream, None)?;
        }
        self.open = None;
        Ok(())
    }

    /// Ends a span, and begins the next.
    fn cut(&mut self, stream: &Stream, on: Option<usize>) -> Result<()> {
        let now = self.mark(stream)?;
        if let Some(start) = self.open.replace(now.clone()) {
            self.spans.push_back(Span { on, start, end: now });
        }
        self.has_work = false;
        if self.spans.len() >= MOST_SPANS {
            self.settle()?;
        }
        Ok(())
    }

    fn mark(&mut self, stream: &Stream) -> Result<Arc<Event>> {
        let event = self.spare.pop().map_or_else(|| Event::new(&self.context, true), Ok)?;
        event.record(stream)?;
        Ok(Arc::new(event))
    }

    /// Adds up what is over.
    pub(super) fn settle(&mut self) -> Result<&Totals> {
        self.context.bind()?;
        while let Some(Span { on, start, end }) = self.spans.front()
            && end.is_done()?
        {
            let seconds = end.seconds_since(start)?.max(0.0);
            self.totals.add(*on, Duration::from_secs_f64(seconds));
            let Span { start, end, .. } = self.spans.pop_front().expect("there is a front");
            // The end may be the start of the next.
            self.spare.extend([start, end].into_iter().filter_map(Arc::into_inner));
        }
        Ok(&self.totals)
    }
}
