//! The order of the samples: which window each position is, and which blocks of the files that takes.
//!
//! A dataset's windows are cut into blocks of neighbours. An epoch reads the blocks in the order of a [`Permutation`] and
//! deals them out to a fixed number of streams, whose samples come in turn. A stream keeps some blocks open. Each
//! block's windows, in an order of their own, are cut into as many shares as blocks are open, one for each stage that the
//! block stays for; the shares of a stage are shuffled together. When a stage is over the oldest block goes and another
//! comes. The first and the last stage of an epoch take in the stages in which fewer blocks would be open, so that the
//! mix is as good there as elsewhere. Where all blocks fit into the window the epoch is one stage: a full shuffle.
//!
//! All of it is arithmetic on (seed, epoch, fingerprint, block, window, streams), whatever the memory, the threads and the
//! ranks are. So an order can be asked anywhere, a position is a number, and going there costs no reading of what lies
//! before: only the blocks open there.
//!
//! The random order is the same thing with blocks of one window and one block open.
//!
//! Costs: for an epoch, 16 bytes for each file whose last block is short; for each open block about 200 bytes; for a
//! sample, two permutations.

use std::ops::Range;
use std::sync::Arc;

use crate::permutation::mix;
use crate::{Error, Permutation, Result};

/// Keeps the permutations of a block and of a stage apart from that of the blocks.
const BLOCK_TAG: u64 = 0x6562_6274_6964_6501;
const STAGE_TAG: u64 = 0x6562_6274_6964_6502;
const DITHER_TAG: u64 = 0x6562_6274_6964_6503;
/// The most streams, and the most blocks of a window.
const MOST: u32 = 1 << 16;

/// How the samples of an epoch are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Any window may come after any other. Each is a read of its own: for data that fits into memory, or is small.
    #[default]
    Random,
    /// Whole blocks are read, once an epoch, and their windows mixed over those that are open.
    Block(BlockOrder),
}

/// What the block order hangs on, beside the seed and the data. A run keeps these from beginning to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct BlockOrder {
    /// Bytes of a block, 1 MiB by default: a whole number of windows of at most that many bytes, at least one.
    pub block_bytes: u64,
    /// Blocks open at a time, in all streams together, 48 by default. The memory that an order needs is about this times
    /// `block_bytes`, and windows are mixed over as much of the data.
    pub window_blocks: u32,
    /// Streams, 8 by default. A number of ranks that divides it reads each block on one rank only, but for the end of an
    /// epoch. With any other each sample still comes once, but ranks read the same blocks.
    pub streams: u32,
}

impl Default for BlockOrder {
    fn default() -> Self {
        Self { block_bytes: 1 << 20, window_blocks: 48, streams: 8 }
    }
}

impl BlockOrder {
    /// Blocks that each stream keeps open, at least one.
    pub(crate) fn open_blocks_of_stream(&self) -> u64 {
        u64::from(self.window_blocks / self.streams.max(1)).max(1)
    }
}

impl Order {
    pub(crate) fn check(&self) -> Result<()> {
        let Self::Block(block) = self else { return Ok(()) };
        let facts = [
            ("bytes of a block", block.block_bytes, u64::MAX),
            ("blocks of the window", block.window_blocks.into(), MOST.into()),
            ("streams", block.streams.into(), MOST.into()),
        ];
        match facts.into_iter().find(|&(_, found, most)| found == 0 || found > most) {
            Some((what, found, most)) => Err(Error::BadOrder { what, found, most }),
            None => Ok(()),
        }
    }
}

/// One window of the data, in the order of delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Samples before it, of all ranks and epochs.
    pub position: u64,
    /// Which window of the dataset it is.
    pub window: u64,
}

/// Windows in blocks: part by part (a file, or a range of one), so that no block lies in two of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// For each part its first window and its first block, and the totals at the end.
    firsts: Vec<(u64, u64)>,
    /// Windows of a block. The last of a part may have fewer.
    per_block: u64,
}

/// A run of windows that is read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) part: usize,
    /// The first window, counted in the part.
    pub(crate) first_in_part: u64,
    /// The first window, counted in the dataset.
    pub(crate) first: u64,
    pub(crate) windows: u64,
}

impl Layout {
    /// The blocks of parts with these numbers of windows.
    pub(crate) fn new(parts: impl IntoIterator<Item = u64>, per_block: u64) -> Self {
        let per_block = per_block.max(1);
        let mut firsts = vec![(0, 0)];
        let (mut window, mut block) = (0, 0);
        for windows in parts {
            window += windows;
            block += windows.div_ceil(per_block);
            firsts.push((window, block));
        }
        Self { firsts, per_block }
    }

    pub(crate) fn windows(&self) -> u64 {
        self.firsts[self.firsts.len() - 1].0
    }

    fn blocks(&self) -> u64 {
        self.firsts[self.firsts.len() - 1].1
    }

    /// Where a block lies.
    pub(crate) fn span(&self, block: u64) -> Span {
        // The last part that begins at this block or before it: parts without windows begin where the next one does.
        let part = self.firsts.partition_point(|&(_, first)| first <= block) - 1;
        let (first_window, first_block) = self.firsts[part];
        let first_in_part = (block - first_block) * self.per_block;
        let windows = (self.firsts[part + 1].0 - first_window - first_in_part).min(self.per_block);
        Span { part, first_in_part, first: first_window + first_in_part, windows }
    }

    /// Windows of the largest block.
    pub(crate) fn most_windows(&self) -> u64 {
        self.firsts.windows(2).map(|pair| (pair[1].0 - pair[0].0).min(self.per_block)).max().unwrap_or(0)
    }

    /// Blocks with fewer windows than others, and how many they have.
    fn short(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.firsts.windows(2).filter_map(|pair| {
            let left = (pair[1].0 - pair[0].0) % self.per_block;
            (left > 0).then(|| (pair[1].1 - 1, left))
        })
    }
}

/// An order over windows: everything that [`Walk`] and [`Stages`] follow from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    layout: Layout,
    seed: u64,
    fingerprint: u64,
    streams: u64,
    /// Blocks open in each stream.
    open: u64,
}

impl Plan {
    /// The order that follows from its arguments. The layout has at least one window, and its blocks are those of `order`.
    pub(crate) fn new(layout: Layout, order: Order, seed: u64, fingerprint: u64) -> Self {
        let blocks = layout.blocks();
        let (streams, open) = match order {
            Order::Random => (1, 1),
            Order::Block(order) => {
                let (streams, open) = (u64::from(order.streams.max(1)), order.open_blocks_of_stream());
                // All open at once: nothing mixes better than one stage.
                if blocks <= streams * open { (1, blocks) } else { (streams, open) }
            }
        };
        Self { layout, seed, fingerprint, streams, open }
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The most blocks that are open at a time.
    pub(crate) fn most_open(&self) -> u64 {
        (self.streams * self.open).min(self.layout.blocks())
    }

    pub(crate) fn streams(&self) -> u64 {
        self.streams
    }

    /// The permutation of one epoch for one purpose.
    fn permutation(&self, n: u64, tag: u64, epoch: u64, which: u64) -> Permutation {
        Permutation::new(n, self.seed ^ tag, epoch, mix(self.fingerprint ^ mix(which)))
    }
}

/// One rank of several that share the samples: sample `p` is of rank `p % world`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Which rank.
    pub rank: u64,
    /// How many there are.
    pub world: u64,
}

impl Default for Share {
    fn default() -> Self {
        Self { rank: 0, world: 1 }
    }
}

impl Share {
    pub(crate) fn check(self) -> Result<()> {
        if self.rank < self.world {
            Ok(())
        } else {
            Err(Error::BadShare { rank: self.rank, world: self.world })
        }
    }

    /// The first position of this rank at `position` or after it.
    fn first_from(self, position: u64) -> Option<u64> {
        position.checked_add((self.rank + self.world - position % self.world) % self.world)
    }
}

/// One epoch's blocks, dealt out to streams.
#[derive(Clone, Debug)]
struct Epoch {
    plan: Arc<Plan>,
    number: u64,
    /// The position of its first sample.
    start: u64,
    blocks: Permutation,
    streams: Vec<Stream>,
}

#[derive(Clone, Debug, Default)]
struct Stream {
    blocks: u64,
    samples: u64,
    /// Places among the stream's blocks of those with fewer windows, and how many they lack.
    short: Vec<(u64, u64)>,
}

impl Epoch {
    fn new(plan: &Arc<Plan>, number: u64) -> Option<Self> {
        let layout = &plan.layout;
        let (blocks, count) = (layout.blocks(), plan.streams);
        let order = Permutation::new(blocks, plan.seed, number, plan.fingerprint);
        let mut streams: Vec<Stream> = (0..count)
            .map(|stream| {
                let blocks = blocks.saturating_sub(stream).div_ceil(count);
                Stream { blocks, samples: blocks * layout.per_block, short: Vec::new() }
            })
            .collect();
        for (block, windows) in layout.short() {
            let place = order.inverse(block);
            let (stream, missing) = (&mut streams[(place % count) as usize], layout.per_block - windows);
            stream.samples -= missing;
            stream.short.push((place / count, missing));
        }
        // An epoch whose positions leave 64 bits is none.
        let start = number.checked_mul(layout.windows())?;
        start.checked_add(layout.windows())?;
        Some(Self { plan: plan.clone(), number, start, blocks: order, streams })
    }

    /// The block at a place of a stream.
    fn block(&self, stream: usize, place: u64) -> u64 {
        self.blocks.get(stream as u64 + place * self.plan.streams)
    }

    /// Stages of a stream.
    fn stages(&self, stream: usize) -> u64 {
        match self.streams[stream].blocks {
            0 => 0,
            blocks => blocks.saturating_sub(self.plan.open) + 1,
        }
    }

    /// The places of the blocks that are open in a stage.
    fn places(&self, stream: usize, stage: u64) -> Range<u64> {
        stage..(stage + self.plan.open).min(self.streams[stream].blocks)
    }

    /// How many of a block's windows come in the first `shares` of its shares. Shares that are no whole numbers are
    /// rounded up or down as the block's number has it.
    fn cut(&self, block: u64, windows: u64, shares: u64) -> u64 {
        let open = self.plan.open;
        let dither = mix(mix(self.plan.seed ^ DITHER_TAG ^ block) ^ self.number) % open;
        ((u128::from(windows) * u128::from(shares) + u128::from(dither)) / u128::from(open)) as u64
    }

    /// The windows of the block at `place` that come in a stage, as a range of the block's own order, and the block's
    /// span.
    fn share(&self, stream: usize, stage: u64, place: u64) -> (u64, Span, Range<u64>) {
        let (open, last) = (self.plan.open, self.stages(stream) - 1);
        let block = self.block(stream, place);
        let span = self.plan.layout.span(block);
        // The block at a place has its shares in steps `place..place + open`, and stage `s` is step `s + open - 1`.
        let from = if stage == 0 { 0 } else { stage + open - 1 - place };
        let to = if stage == last { open } else { stage + open - place };
        let cut = |shares| self.cut(block, span.windows, shares);
        (block, span, cut(from.min(open))..cut(to.min(open)))
    }

    /// Samples of a stream before a stage.
    fn before(&self, stream: usize, stage: u64) -> u64 {
        let info = &self.streams[stream];
        if stage == 0 {
            return 0;
        }
        if stage >= self.stages(stream) {
            return info.samples;
        }
        let missing: u64 =
            info.short.iter().filter(|(place, _)| *place < stage).map(|(_, missing)| missing).sum();
        let partial: u64 =
            self.places(stream, stage).map(|place| self.share(stream, stage, place).2.start).sum();
        stage * self.plan.layout.per_block - missing + partial
    }

    /// The stage of a stream in which its sample `round` comes, which there is.
    fn stage_of(&self, stream: usize, round: u64) -> u64 {
        let (mut low, mut high) = (0, self.stages(stream));
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.before(stream, middle) <= round { low = middle } else { high = middle }
        }
        low
    }

    /// The stream whose turn is first in a round.
    fn first_stream(&self) -> usize {
        (self.start % self.plan.streams) as usize
    }

    /// Whether a stream's turn comes before another's.
    fn comes_before(&self, stream: usize, other: usize) -> bool {
        let turn = |stream| (stream + self.streams.len() - self.first_stream()) % self.streams.len();
        turn(stream) < turn(other)
    }

    /// Samples of the epoch before a round: those of every stream that are numbered below it.
    fn before_round(&self, round: u64) -> u64 {
        self.streams.iter().map(|stream| stream.samples.min(round)).sum()
    }

    /// The round that a sample of the epoch is in.
    fn round_of(&self, sample: u64) -> u64 {
        let (mut low, mut high) = (0, self.streams.iter().map(|stream| stream.samples).max().unwrap_or(0));
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.before_round(middle) <= sample { low = middle } else { high = middle }
        }
        low
    }

    /// The position of a stream's sample.
    fn position(&self, stream: usize, round: u64) -> u64 {
        let earlier = self
            .streams
            .iter()
            .enumerate()
            .filter(|(other, info)| info.samples > round && self.comes_before(*other, stream));
        self.start + self.before_round(round) + earlier.count() as u64
    }

    /// The first round of a stream, from `from` on, whose sample is a rank's, and the sample's position.
    fn first_of_rank(&self, stream: usize, from: u64, share: Share) -> Option<(u64, u64)> {
        // While every stream has samples, positions of a stream lie evenly: ranks come round within `world` of them, or
        // never before the first stream ends.
        let even = self.streams.iter().map(|stream| stream.samples).min().unwrap_or(0);
        let rounds = from..from.saturating_add(share.world).min(even);
        rounds.chain(from.max(even)..self.streams[stream].samples).find_map(|round| {
            let position = self.position(stream, round);
            (position % share.world == share.rank).then_some((round, position))
        })
    }
}

/// A stage that a rank comes to, and what it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    pub(crate) epoch: u64,
    pub(crate) stream: usize,
    stage: u64,
    /// Samples of the stream before it.
    before: u64,
    /// Samples of the stream before the next one.
    end: u64,
    /// The first position in it that is the rank's.
    pub(crate) position: u64,
    /// Places of blocks below this one are open no longer.
    pub(crate) closed_below: u64,
    /// Places and blocks to open.
    pub(crate) opened: Vec<(u64, u64)>,
}

/// The stages that a rank comes to, in the order of the first sample it has in each: what readers follow.
#[derive(Clone, Debug)]
pub(crate) struct Stages {
    share: Share,
    epoch: Option<Epoch>,
    /// For each stream its next stage of the rank.
    next: Vec<Option<Stage>>,
    /// For each stream the place after the last one opened.
    opened: Vec<u64>,
}

impl Stages {
    /// The stages from a position on.
    pub(crate) fn new(plan: &Arc<Plan>, position: u64, share: Share) -> Self {
        let windows = plan.layout.windows();
        let mut stages =
            Self { share, epoch: Epoch::new(plan, position / windows), next: Vec::new(), opened: Vec::new() };
        stages.enter(position % windows);
        stages
    }

    /// Goes to a sample of the epoch.
    fn enter(&mut self, sample: u64) {
        let Some(epoch) = &self.epoch else { return };
        let round = epoch.round_of(sample);
        let position = epoch.start + sample;
        self.opened = vec![0; epoch.streams.len()];
        self.next = (0..epoch.streams.len())
            .map(|stream| {
                let samples = epoch.streams[stream].samples;
                let passed = round < samples && epoch.position(stream, round) < position;
                Self::find(epoch, stream, round + u64::from(passed), None, self.share)
            })
            .collect();
    }

    /// The stage of the rank's first sample of a stream from round `from` on. `guess` is a stage and where it begins.
    fn find(
        epoch: &Epoch,
        stream: usize,
        from: u64,
        guess: Option<(u64, u64)>,
        share: Share,
    ) -> Option<Stage> {
        let (round, position) = epoch.first_of_rank(stream, from, share)?;
        let bounds = |stage, before| (stage, before, epoch.before(stream, stage + 1));
        let guess = guess.map(|(stage, before)| bounds(stage, before)).filter(|&(_, _, end)| round < end);
        let (stage, before, end) = guess.unwrap_or_else(|| {
            let stage = epoch.stage_of(stream, round);
            bounds(stage, epoch.before(stream, stage))
        });
        Some(Stage {
            epoch: epoch.number,
            stream,
            stage,
            before,
            end,
            position,
            closed_below: stage,
            opened: Vec::new(),
        })
    }
}

impl Iterator for Stages {
    type Item = Stage;

    fn next(&mut self) -> Option<Stage> {
        loop {
            let epoch = self.epoch.as_ref()?;
            let first = self.next.iter().flatten().min_by_key(|stage| stage.position);
            let Some(stream) = first.map(|stage| stage.stream) else {
                self.epoch = Epoch::new(&epoch.plan, epoch.number.checked_add(1)?);
                self.enter(0);
                continue;
            };
            let mut stage = self.next[stream].take()?;
            self.next[stream] =
                Self::find(epoch, stream, stage.end, Some((stage.stage + 1, stage.end)), self.share);
            let places = epoch.places(stream, stage.stage);
            let fresh = places.start.max(self.opened[stream])..places.end;
            self.opened[stream] = places.end;
            stage.opened = fresh.map(|place| (place, epoch.block(stream, place))).collect();
            return Some(stage);
        }
    }
}

/// A stage as samples: shares of blocks, shuffled together.
#[derive(Clone, Debug)]
struct Mix {
    /// Samples of the stream before it.
    before: u64,
    end: u64,
    order: Permutation,
    /// For each open block the samples before its share, and the share.
    shares: Vec<BlockShare>,
}

#[derive(Clone, Debug)]
struct BlockShare {
    before: u64,
    place: u64,
    first_window: u64,
    /// The first of the share in the block's order.
    start: u64,
    order: Permutation,
}

impl Mix {
    fn new(epoch: &Epoch, stage: &Stage) -> Self {
        let (plan, stream) = (&epoch.plan, stage.stream);
        let mut before = 0;
        let mut shares = Vec::new();
        for place in epoch.places(stream, stage.stage) {
            let (block, span, share) = epoch.share(stream, stage.stage, place);
            if share.is_empty() {
                continue;
            }
            let order = plan.permutation(span.windows, BLOCK_TAG, epoch.number, block);
            let first_window = span.first;
            shares.push(BlockShare { before, place, first_window, start: share.start, order });
            before += share.end - share.start;
        }
        debug_assert_eq!(before, stage.end - stage.before);
        let which = stage.stage * plan.streams + stream as u64;
        let order = plan.permutation(before, STAGE_TAG, epoch.number, which);
        Self { before: stage.before, end: stage.end, order, shares }
    }

    /// The place of the block and the window of a sample of the stream, which is in this stage.
    fn get(&self, round: u64) -> (u64, u64) {
        let at = self.order.get(round - self.before);
        let share = &self.shares[self.shares.partition_point(|share| share.before <= at) - 1];
        (share.place, share.first_window + share.order.get(share.start + at - share.before))
    }
}

/// A sample to come: [`Walk::sample`] says which window it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) position: u64,
    pub(crate) stream: usize,
    /// Samples of the stream before it.
    round: u64,
    /// The stage that begins with this sample, if one does.
    pub(crate) entered: Option<Stage>,
}

/// The samples of one rank, in order. Ends with the last epoch that has room in 64 bits.
#[derive(Clone, Debug)]
pub(crate) struct Walk {
    stages: std::iter::Peekable<Stages>,
    share: Share,
    epoch: Option<Epoch>,
    /// The round of the next sample, the streams that have one in it, by turn, and whose turn it is.
    round: u64,
    turns: Vec<usize>,
    turn: usize,
    /// The first round with fewer streams.
    fewer: u64,
    position: u64,
    mixes: Vec<Option<Mix>>,
}

impl Walk {
    /// The samples from a position on that are the rank's.
    pub(crate) fn new(plan: &Arc<Plan>, position: u64, share: Share) -> Self {
        let first = share.first_from(position);
        let stages = Stages::new(plan, position, share).peekable();
        let mut walk = Self {
            stages,
            share,
            epoch: None,
            round: 0,
            turns: Vec::new(),
            turn: 0,
            fewer: 0,
            position: first.unwrap_or(u64::MAX),
            mixes: Vec::new(),
        };
        if first.is_some() {
            walk.enter(plan);
        }
        walk
    }

    /// Begins the epoch of the position.
    fn enter(&mut self, plan: &Arc<Plan>) {
        let windows = plan.layout.windows();
        self.epoch = Epoch::new(plan, self.position / windows);
        let Some(epoch) = &self.epoch else { return };
        let sample = self.position - epoch.start;
        self.round = epoch.round_of(sample);
        self.turn = (sample - epoch.before_round(self.round)) as usize;
        self.mixes = vec![None; epoch.streams.len()];
        self.take_turns();
    }

    /// The sample of the last step, and the place of its block among those of the stream.
    pub(crate) fn sample(&self, step: &Step) -> Option<(Sample, u64)> {
        let (place, window) = self.mixes[step.stream].as_ref()?.get(step.round);
        Some((Sample { position: step.position, window }, place))
    }

    /// The samples from here on.
    pub(crate) fn samples(mut self) -> impl Iterator<Item = Sample> {
        std::iter::from_fn(move || {
            let step = self.next()?;
            self.sample(&step).map(|(sample, _)| sample)
        })
    }

    /// Finds the streams of the round.
    fn take_turns(&mut self) {
        let Some(epoch) = &self.epoch else { return };
        let (count, first, round) = (epoch.streams.len(), epoch.first_stream(), self.round);
        self.turns = (0..count)
            .map(|turn| (first + turn) % count)
            .filter(|&stream| epoch.streams[stream].samples > round)
            .collect();
        let samples = self.turns.iter().map(|&stream| epoch.streams[stream].samples);
        self.fewer = samples.min().unwrap_or(u64::MAX);
    }
}

impl Iterator for Walk {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        // The turn may have run over into a later round, or out of the epoch.
        while self.turn >= self.turns.len() {
            if self.turns.is_empty() {
                let plan = self.epoch.as_ref()?.plan.clone();
                self.enter(&plan);
                self.epoch.as_ref()?;
                continue;
            }
            self.turn -= self.turns.len();
            self.round += 1;
            if self.round >= self.fewer {
                self.take_turns();
            }
        }
        let epoch = self.epoch.as_ref()?;
        let stream = self.turns[self.turn];
        let within = self.mixes[stream].as_ref().is_some_and(|mix| self.round < mix.end);
        let entered = match within {
            true => None,
            false => Some(self.stages.next()?),
        };
        if let Some(stage) = &entered {
            debug_assert_eq!((stage.position, stage.stream), (self.position, stream));
            self.mixes[stream] = Some(Mix::new(epoch, stage));
        }
        let step = Step { position: self.position, stream, round: self.round, entered };
        match self.position.checked_add(self.share.world) {
            Some(position) => {
                self.position = position;
                self.turn += usize::try_from(self.share.world).unwrap_or(usize::MAX);
            }
            None => self.epoch = None,
        }
        Some(step)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plan(parts: &[u64], per_block: u64, open: u32, streams: u32, seed: u64) -> Arc<Plan> {
        let order = Order::Block(BlockOrder { block_bytes: 1, window_blocks: open, streams });
        Arc::new(Plan::new(Layout::new(parts.iter().copied(), per_block), order, seed, 7))
    }

    fn windows(plan: &Arc<Plan>, from: u64, share: Share, count: usize) -> Vec<(u64, u64)> {
        let samples = Walk::new(plan, from, share).samples().take(count);
        samples.map(|sample| (sample.position, sample.window)).collect()
    }

    prop_compose! {
        fn any_plan()(
            parts in prop::collection::vec(0u64..80, 1..6),
            first in 1u64..80,
            per_block in 1u64..20,
            open in 1u32..12,
            streams in 1u32..7,
            seed: u64,
        ) -> Arc<Plan> {
            plan(&[&[first], &parts[..]].concat(), per_block, open, streams, seed)
        }
    }

    proptest! {
        #[test]
        fn every_window_comes_once_an_epoch(plan in any_plan(), epoch in 0u64..4) {
            let n = plan.layout.windows();
            let samples = windows(&plan, epoch * n, Share::default(), n as usize);
            prop_assert!(samples.iter().map(|sample| sample.0).eq(epoch * n..(epoch + 1) * n));
            let mut seen: Vec<u64> = samples.into_iter().map(|sample| sample.1).collect();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..n));
        }

        #[test]
        fn going_on_anywhere_is_the_unbroken_order(plan in any_plan(), from in 0u64..900, world in 1u64..9) {
            let count = 2 * plan.layout.windows();
            let whole = windows(&plan, 0, Share::default(), (from + count) as usize);
            // A position, and the ranks' shares from there, which together are the rest.
            let mut parts: Vec<_> = (0..world)
                .flat_map(|rank| windows(&plan, from, Share { rank, world }, (count / world) as usize))
                .collect();
            parts.sort_unstable();
            prop_assert_eq!(&parts[..], &whole[from as usize..][..parts.len()]);
        }

        #[test]
        fn blocks_are_open_when_they_are_wanted_and_no_more_than_fit(
            plan in any_plan(),
            from in 0u64..900,
            rank in 0u64..4,
            world in 4u64..6,
        ) {
            let share = Share { rank, world };
            let n = plan.layout.windows();
            let mut planned = Stages::new(&plan, from, share);
            let mut open: Vec<std::collections::BTreeMap<u64, u64>> = vec![Default::default(); plan.streams() as usize];
            let mut epoch = from / n;
            let mut walk = Walk::new(&plan, from, share);
            for _ in 0..2 * n {
                let step = walk.next().unwrap();
                let (sample, place) = walk.sample(&step).unwrap();
                if let Some(stage) = step.entered {
                    // Readers and the gatherer go through the same stages.
                    prop_assert_eq!(planned.next(), Some(stage.clone()));
                    if stage.epoch != epoch {
                        open.iter_mut().for_each(|open| open.clear());
                        epoch = stage.epoch;
                    }
                    let open = &mut open[stage.stream];
                    open.retain(|&place, _| place >= stage.closed_below);
                    for (place, block) in stage.opened {
                        prop_assert_eq!(open.insert(place, block), None);
                    }
                }
                prop_assert!(open.iter().map(|open| open.len() as u64).sum::<u64>() <= plan.most_open());
                let span = plan.layout.span(open[step.stream][&place]);
                prop_assert!((span.first..span.first + span.windows).contains(&sample.window));
            }
        }
    }

    #[test]
    fn one_rank_reads_each_block_once_an_epoch_and_ranks_share_them() {
        // 100 blocks of 10 windows, the last of 4.
        let plan = plan(&[500, 494], 10, 8, 4, 3);
        let opened = |share| -> Vec<u64> {
            let stages = Stages::new(&plan, 0, share).take_while(|stage| stage.epoch == 0);
            stages.flat_map(|stage| stage.opened).map(|(_, block)| block).collect()
        };
        let mut all = opened(Share::default());
        assert!(all.windows(2).any(|pair| pair[0] > pair[1]), "blocks come in no order");
        all.sort_unstable();
        assert!(all.into_iter().eq(0..100));
        // Streams divide evenly, so that only where the last one ends blocks are read by more ranks than one.
        for world in [2, 4] {
            let read: usize = (0..world).map(|rank| opened(Share { rank, world }).len()).sum();
            let most = 100 + (world - 1) * plan.most_open();
            assert!((100..=most).contains(&(read as u64)), "{world} ranks: {read}");
        }
    }

    #[test]
    fn windows_are_mixed_over_the_open_blocks_from_the_first_to_the_last() {
        let plan = plan(&[64_000], 100, 32, 8, 1);
        let samples = windows(&plan, 0, Share::default(), 64_000);
        for batch in samples.chunks(256) {
            let blocks: std::collections::HashSet<u64> = batch.iter().map(|sample| sample.1 / 100).collect();
            assert!(blocks.len() > 20, "a batch of {} blocks", blocks.len());
        }
        // Neighbours in the data are as far apart as the window allows.
        let mut at = vec![0i64; 64_000];
        samples.iter().for_each(|&(position, window)| at[window as usize] = position as i64);
        let apart: i64 = (1..100).map(|i| (at[5000 + i] - at[5000 + i - 1]).abs()).sum::<i64>() / 99;
        assert!(apart > 700, "{apart}");
    }

    #[test]
    fn what_fits_into_the_window_is_shuffled_whole() {
        let plan = plan(&[1000], 100, 10, 2, 1);
        let first: Vec<u64> =
            windows(&plan, 0, Share::default(), 100).iter().map(|sample| sample.1 / 100).collect();
        let blocks: std::collections::HashSet<_> = first.into_iter().collect();
        assert_eq!((plan.most_open(), blocks.len()), (10, 10));
    }

    #[test]
    fn random_order_is_the_permutation() {
        let plan = Arc::new(Plan::new(Layout::new([1000, 0, 234], 1), Order::Random, 5, 9));
        let (first, second) = (Permutation::new(1234, 5, 0, 9), Permutation::new(1234, 5, 1, 9));
        let expected: Vec<u64> =
            (0..1234).map(|i| first.get(i)).chain((0..1234).map(|i| second.get(i))).collect();
        let found = windows(&plan, 0, Share::default(), 2468);
        assert!(found.into_iter().map(|sample| sample.1).eq(expected));
    }

    #[test]
    fn sizes_at_the_powers_of_two() {
        for k in 8..16 {
            for n in [(1u64 << k) - 1, 1 << k, (1 << k) + 1] {
                for plan in
                    [plan(&[n], 16, 4, 2, 1), Arc::new(Plan::new(Layout::new([n], 1), Order::Random, 1, 1))]
                {
                    let mut seen: Vec<u64> = windows(&plan, n, Share::default(), n as usize)
                        .iter()
                        .map(|sample| sample.1)
                        .collect();
                    seen.sort_unstable();
                    assert!(seen.into_iter().eq(0..n), "{n}");
                }
            }
        }
    }

    #[test]
    fn hundreds_of_billions_of_windows_take_no_memory() {
        let n = 100_000_000_000;
        let plan = plan(&[n / 3, n - n / 3], 2048, 64, 8, 1);
        for from in [0, n / 2, n - 5, 7 * n + 3] {
            let samples = windows(&plan, from, Share { rank: 1, world: 2 }, 10);
            assert!(samples.iter().all(|&(position, window)| position % 2 == 1 && window < n));
        }
        // The last epoch that has room in 64 bits.
        let end = u64::MAX / n * n;
        let last = windows(&plan, end - 3, Share::default(), 10);
        assert!(last.iter().map(|sample| sample.0).eq(end - 3..end));
    }

    /// Runs that are resumed by a later version hang on these.
    #[test]
    fn order_never_changes() {
        let first = |plan: &Arc<Plan>, from| -> Vec<u64> {
            windows(plan, from, Share::default(), 8).into_iter().map(|sample| sample.1).collect()
        };
        let plan = plan(&[100, 57], 8, 6, 3, 1337);
        assert_eq!(first(&plan, 0), [132, 113, 125, 134, 111, 80, 146, 110]);
        assert_eq!(first(&plan, 150), [73, 20, 74, 16, 7, 5, 4, 21]);
    }
}
