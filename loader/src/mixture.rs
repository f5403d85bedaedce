//! Several datasets in one stream, in given proportions.
//!
//! A [`Mixture`] says which source each position takes its sample from, and which sample of that source it is: the next
//! one of the source's own order, so that a source's samples come in its order, none left out and none twice, whatever the
//! weights are and however often they change. It is arithmetic on (seed, weights, position): nothing is drawn at random,
//! and a position can be gone to without walking there.
//!
//! Weights are whole numbers `w` with the sum `W`. After `n` samples under them a source has had more than `n w / W - 1` and
//! fewer than `n w / W + 1`. That holds if its sample `j` comes at or after step `floor(j W / w)` and before step
//! `ceil((j + 1) W / w)`, and taking of the samples that may come the one whose time ends first always succeeds (Baruah,
//! Cohen, Plaxton and Varvel, "Proportionate progress", Algorithmica 15, 1996). Where two end at the same time, the seed
//! and the step decide, so that a source does not keep to one place of a batch. After `W` steps all is as at the start.
//!
//! Costs: for each change of weights two numbers a source; going to a position walks at most `W` steps, which is at most
//! 2^20, and a step looks at each source once.

use std::cmp::Ordering;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::loader::{Loader, LoaderOptions, LoaderReport, LoaderState};
use crate::memory;
use crate::order::Share;
use crate::permutation::mix;
use crate::prefetch::TokenBatch;
use crate::{Error, Result, Samples};

/// The largest sum of weights, once they are reduced: steps that going to a position may take.
const MOST_WEIGHT: u64 = 1 << 20;
/// The most sources.
const MOST_SOURCES: usize = 1 << 10;
/// Keeps the choice between equals apart from other uses of the seed.
const TIE_TAG: u64 = 0x6562_6274_6964_6505;

/// Which source each position takes its sample from, and which sample of it.
///
/// ```
/// use ebbtide_loader::Mixture;
///
/// # fn main() -> ebbtide_loader::Result<()> {
/// let mut mixture = Mixture::new(1337, &Mixture::weights(&["0.7", "0.3"])?)?;
/// assert_eq!(mixture.taken(1000), [700, 300]);
///
/// // From position 1000 on a third source joins, and the first is drawn no longer.
/// mixture.change(1000, &[0, 1, 1])?;
/// assert_eq!(mixture.taken(1100), [700, 350, 50]);
/// let draw = mixture.draws(1100).next().unwrap();
/// assert!(draw.source == 1 && draw.sample == 350 || draw.source == 2 && draw.sample == 50);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "MixtureFacts", into = "MixtureFacts")]
pub struct Mixture {
    seed: u64,
    group: u64,
    phases: Vec<Phase>,
}

/// Weights, and where they come into force.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Phase {
    /// The position of the first sample under them.
    from: u64,
    weights: Vec<u64>,
    /// The weights without their common divisor: how often a source comes in a period.
    shares: Vec<u64>,
    /// Steps before this phase that took a source.
    before: Vec<u64>,
}

/// What a [`Mixture`] is written down as.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct MixtureFacts {
    seed: u64,
    group: u64,
    /// Positions, and the weights from there on.
    weights: Vec<(u64, Vec<u64>)>,
}

impl From<Mixture> for MixtureFacts {
    fn from(mixture: Mixture) -> Self {
        let weights = mixture.phases.into_iter().map(|phase| (phase.from, phase.weights));
        Self { seed: mixture.seed, group: mixture.group, weights: weights.collect() }
    }
}

impl TryFrom<MixtureFacts> for Mixture {
    type Error = Error;

    fn try_from(facts: MixtureFacts) -> Result<Self> {
        let mut phases = facts.weights.iter();
        let first = phases.next().ok_or_else(|| bad("weights", "at least one set of them", "none"))?;
        if first.0 != 0 {
            return Err(bad("the position of the first weights", "0", first.0));
        }
        let mut mixture = Self::new(facts.seed, &first.1)?.grouped(facts.group)?;
        phases.try_for_each(|(from, weights)| mixture.change(*from, weights))?;
        Ok(mixture)
    }
}

/// One sample of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Samples before it, of all sources and ranks.
    pub position: u64,
    /// The source it is of.
    pub source: usize,
    /// Its position in that source's own order: samples of the source before it.
    pub sample: u64,
}

impl Mixture {
    /// Sources with these weights, from position 0 on. Only proportions count; a source of weight 0 is not drawn.
    ///
    /// # Errors
    ///
    /// [`Error::BadMixture`] without sources or with more than 1024, if all weights are 0, or if their sum is above 2^20
    /// even without their common divisor.
    pub fn new(seed: u64, weights: &[u64]) -> Result<Self> {
        let phase = Phase::new(0, weights, vec![0; weights.len()])?;
        Ok(Self { seed, group: 1, phases: vec![phase] })
    }

    /// Takes `group` samples of a source at a time, so that ranks whose number divides `group` can share the samples out:
    /// each then reads only its own. Proportions hold to within `group` samples instead of one.
    ///
    /// # Errors
    ///
    /// [`Error::BadMixture`] for 0, above 65536, or if weights change at a position that is no multiple of `group`.
    pub fn grouped(self, group: u64) -> Result<Self> {
        if !(1..=1 << 16).contains(&group) {
            return Err(bad("the group", "at least 1 and at most 65536", group));
        }
        let mut grouped = Self { group, phases: self.phases[..1].to_vec(), ..self };
        self.phases[1..].iter().try_for_each(|phase| grouped.change(phase.from, &phase.weights))?;
        Ok(grouped)
    }

    /// Weights as decimals, such as `0.7` and `0.3`, or `2` and `1`: as whole numbers in the same proportions.
    ///
    /// # Errors
    ///
    /// [`Error::BadMixture`] for what is no decimal of at most twelve digits.
    pub fn weights<S: AsRef<str>>(decimals: &[S]) -> Result<Vec<u64>> {
        const DIGITS: usize = 12;
        let parse = |decimal: &str| {
            let (whole, fraction) = decimal.split_once('.').unwrap_or((decimal, ""));
            let digits = format!("{whole}{fraction}");
            let fits =
                (1..=DIGITS).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
            let value = digits.parse::<u64>().ok().filter(|_| fits)?;
            Some((value, fraction.len()))
        };
        let parsed = decimals.iter().map(|decimal| {
            let expected = "a decimal of at most 12 digits, such as 0.7";
            parse(decimal.as_ref())
                .ok_or_else(|| bad("a weight", expected, format!("`{}`", decimal.as_ref())))
        });
        let parsed = parsed.collect::<Result<Vec<_>>>()?;
        let places = parsed.iter().map(|&(_, places)| places).max().unwrap_or(0);
        let scaled = parsed.iter().map(|&(value, own)| {
            let scaled = 10u64.checked_pow((places - own) as u32).and_then(|power| value.checked_mul(power));
            scaled.ok_or_else(|| {
                bad("weights", "weights that fit 64 bits", format!("{value} with {places} decimals"))
            })
        });
        scaled.collect()
    }

    /// Other weights from position `from` on, for more sources than before if there are more of them. Each source goes on
    /// where it is; a new one begins at its start.
    ///
    /// # Errors
    ///
    /// [`Error::BadMixture`] as with [`new`](Self::new), for fewer weights than before (a source goes by the weight 0), and
    /// unless `from` is a multiple of the group after the last change.
    pub fn change(&mut self, from: u64, weights: &[u64]) -> Result<()> {
        let last = self.last();
        if from <= last.from {
            return Err(bad(
                "the position of a change",
                format!("one after the last change's, {}", last.from),
                from,
            ));
        }
        if !from.is_multiple_of(self.group) {
            return Err(bad(
                "the position of a change",
                format!("a multiple of the group of {}", self.group),
                from,
            ));
        }
        if weights.len() < last.weights.len() {
            let expected = format!("at least {}: a source that goes has the weight 0", last.weights.len());
            return Err(bad("the number of weights", expected, weights.len()));
        }
        let mut before = self.walk_to(from / self.group).steps();
        before.resize(weights.len(), 0);
        self.phases.push(Phase::new(from, weights, before)?);
        Ok(())
    }

    /// How many sources there are, those included that a change adds.
    pub fn sources(&self) -> usize {
        self.last().weights.len()
    }

    /// Samples of a source that come in a row, 1 unless [`grouped`](Self::grouped).
    pub fn group(&self) -> u64 {
        self.group
    }

    /// The positions at which weights come into force, and the weights.
    pub fn changes(&self) -> impl Iterator<Item = (u64, &[u64])> {
        self.phases.iter().map(|phase| (phase.from, &phase.weights[..]))
    }

    /// Where this mixture and another part ways before a position: the first position whose weights are not in the same
    /// proportions, or come into force elsewhere. Without one, both draw the same samples up to there, whatever they do
    /// after it; sources that one has beyond the other's are not drawn before it. Mixtures of two seeds or groups part at once.
    pub fn parts_before(&self, other: &Self, position: u64) -> Option<u64> {
        if position > 0 && (self.seed, self.group) != (other.seed, other.group) {
            return Some(0);
        }
        let past = |mixture: &Self| mixture.phases.partition_point(|phase| phase.from < position);
        let phases = past(self).max(past(other));
        (0..phases).find_map(|index| {
            let pair = [self, other].map(|mixture| mixture.phases[..past(mixture)].get(index));
            let parts = match pair {
                [Some(ours), Some(theirs)] => ours.from != theirs.from || !ours.draws_as(theirs),
                _ => true,
            };
            let from = pair.into_iter().flatten().map(|phase| phase.from).min();
            from.filter(|_| parts)
        })
    }

    /// For each source its samples before a position: where the source's own order goes on there.
    pub fn taken(&self, position: u64) -> Vec<u64> {
        let mut walk = self.walk_to(position / self.group);
        let mut taken: Vec<_> = walk.steps().iter().map(|steps| steps * self.group).collect();
        taken.resize(self.sources(), 0);
        let rest = position % self.group;
        if rest > 0 {
            taken[walk.next().0] += rest;
        }
        taken
    }

    /// Whether a source is drawn at a position or after it.
    pub fn draws_from(&self, source: usize, position: u64) -> bool {
        let ends = self.phases.iter().skip(1).map(|phase| phase.from).chain([u64::MAX]);
        let weighs = |phase: &Phase| phase.weights.get(source).is_some_and(|&weight| weight > 0);
        self.phases.iter().zip(ends).any(|(phase, end)| end > position && weighs(phase))
    }

    /// The samples from a position on, to the end of 64 bits.
    pub fn draws(&self, position: u64) -> Draws {
        let walk = self.walk_to(position / self.group);
        let mut draws = Draws { position: Some(position), walk, current: (0, 0) };
        if !position.is_multiple_of(self.group) {
            draws.current = draws.walk.next();
        }
        draws
    }

    fn last(&self) -> &Phase {
        &self.phases[self.phases.len() - 1]
    }

    fn walk_to(&self, step: u64) -> Walk {
        let phase = self.phases.partition_point(|phase| phase.from / self.group <= step) - 1;
        let mut walk = Walk::new(Arc::new(self.clone()), phase);
        let steps = step - self.phases[phase].from / self.group;
        walk.periods = steps / walk.period;
        for _ in 0..steps % walk.period {
            walk.pass(walk.choose());
        }
        walk
    }
}

impl Phase {
    fn new(from: u64, weights: &[u64], before: Vec<u64>) -> Result<Self> {
        if !(1..=MOST_SOURCES).contains(&weights.len()) {
            return Err(bad("sources", "at least 1 and at most 1024", weights.len()));
        }
        let divisor = weights.iter().fold(0, |divisor, &weight| common_divisor(divisor, weight));
        if divisor == 0 {
            return Err(bad("weights", "one of them above 0", format!("{weights:?}")));
        }
        let shares: Vec<_> = weights.iter().map(|weight| weight / divisor).collect();
        let sum: u128 = shares.iter().map(|&share| u128::from(share)).sum();
        if sum > MOST_WEIGHT.into() {
            let expected =
                format!("a sum of at most {MOST_WEIGHT} without their common divisor; rounder ones");
            return Err(bad("weights", expected, format!("{sum} of {weights:?}")));
        }
        Ok(Self { from, weights: weights.to_vec(), shares, before })
    }

    /// Whether sources come in the same proportions; one that only one of the two has must not come at all.
    fn draws_as(&self, other: &Self) -> bool {
        let share = |phase: &Self, source| phase.shares.get(source).copied().unwrap_or(0);
        (0..self.shares.len().max(other.shares.len()))
            .all(|source| share(self, source) == share(other, source))
    }
}

/// Step by step through a mixture.
#[derive(Clone, Debug)]
struct Walk {
    mixture: Arc<Mixture>,
    phase: usize,
    /// Steps of a period.
    period: u64,
    /// Periods of the phase that are over.
    periods: u64,
    /// Steps of this period.
    at: u64,
    /// For each source its steps of this period.
    taken: Vec<u64>,
}

impl Walk {
    fn new(mixture: Arc<Mixture>, phase: usize) -> Self {
        let shares = &mixture.phases[phase].shares;
        let (period, taken) = (shares.iter().sum(), vec![0; shares.len()]);
        Self { mixture, phase, period, periods: 0, at: 0, taken }
    }

    /// The number of the next step, from the start of the mixture.
    fn step(&self) -> u64 {
        self.mixture.phases[self.phase].from / self.mixture.group + self.periods * self.period + self.at
    }

    /// For each source the steps that took it.
    fn steps(&self) -> Vec<u64> {
        (0..self.taken.len()).map(|source| self.steps_of(source)).collect()
    }

    fn steps_of(&self, source: usize) -> u64 {
        let phase = &self.mixture.phases[self.phase];
        phase.before[source] + self.periods * phase.shares[source] + self.taken[source]
    }

    /// The source that the next step takes, if no other phase begins there.
    fn choose(&self) -> usize {
        let shares = &self.mixture.phases[self.phase].shares;
        let key = mix(self.mixture.seed ^ TIE_TAG ^ mix(self.step()));
        let may_come = shares.iter().zip(&self.taken).enumerate().filter_map(|(source, (&share, &taken))| {
            let begun = share > 0 && taken * self.period / share <= self.at;
            begun.then(|| (((taken + 1) * self.period).div_ceil(share), source))
        });
        let tie = |source: usize| mix(key ^ source as u64);
        let first = may_come.reduce(|first, next| match next.0.cmp(&first.0) {
            Ordering::Less => next,
            Ordering::Equal if tie(next.1) < tie(first.1) => next,
            _ => first,
        });
        let Some((_, source)) = first else {
            unreachable!("a period has as many steps as its shares add up to")
        };
        source
    }

    /// Goes past a step that takes a source.
    fn pass(&mut self, source: usize) {
        self.taken[source] += 1;
        self.at += 1;
        if self.at == self.period {
            debug_assert_eq!(self.taken, self.mixture.phases[self.phase].shares);
            self.taken.fill(0);
            self.at = 0;
            self.periods += 1;
        }
    }

    /// The source of the next step, and the steps that took it before.
    fn next(&mut self) -> (usize, u64) {
        let next = self.mixture.phases.get(self.phase + 1);
        if next.is_some_and(|next| next.from / self.mixture.group == self.step()) {
            *self = Self::new(self.mixture.clone(), self.phase + 1);
        }
        let source = self.choose();
        let before = self.steps_of(source);
        self.pass(source);
        (source, before)
    }
}

/// Iterates over the [`Draw`]s of a [`Mixture`].
#[derive(Clone, Debug)]
pub struct Draws {
    /// The next one, unless positions have ended.
    position: Option<u64>,
    walk: Walk,
    /// The source of the step that the position is in, and the steps that took it before.
    current: (usize, u64),
}

impl Iterator for Draws {
    type Item = Draw;

    fn next(&mut self) -> Option<Draw> {
        let (position, group) = (self.position?, self.walk.mixture.group);
        let within = position % group;
        if within == 0 {
            self.current = self.walk.next();
        }
        self.position = position.checked_add(1);
        let (source, before) = self.current;
        Some(Draw { position, source, sample: before * group + within })
    }
}

/// Batches of a [`Mixture`] of datasets.
///
/// Each source has a [`Loader`] of its own, which reads its samples in its own order; the mixture says whose turn it is.
/// Samples are handed over one by one, and copied once more than those of a [`Loader`].
///
/// ```
/// use ebbtide_loader::{Dataset, LoaderOptions, Mixture, MixtureLoader, MixtureState, Source, TokenWriter};
///
/// # fn main() -> ebbtide_loader::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let mut sources = Vec::new();
/// for (name, first) in [("web", 0), ("code", 10_000)] {
///     let mut writer = TokenWriter::create(&folder.path().join(name))?;
///     writer.write(&(first..first + 10_000).collect::<Vec<u16>>())?;
///     writer.finish()?;
///     let dataset = Dataset::open(folder.path().join(name))?;
///     sources.push(Source::from(dataset.samples(0..dataset.len(), 8)?));
/// }
/// let mixture = Mixture::new(1337, &[3, 1])?;
/// let options = LoaderOptions { seed: 1337, batch: 4, ram_bytes: Some(64 << 20), ..LoaderOptions::default() };
/// let mut loader = MixtureLoader::new(&mixture, &sources, &options, &MixtureState::default())?;
/// let first = loader.next()?;
/// assert_eq!(first.sources.iter().filter(|&&source| source == 0).count(), 3);
///
/// let mut resumed = MixtureLoader::new(&mixture, &sources, &options, &loader.state())?;
/// assert_eq!(resumed.next()?, loader.next()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MixtureLoader {
    draws: Draws,
    /// Those of sources that are drawn no longer are missing.
    loaders: Vec<Option<Loader>>,
    share: Share,
    batch: usize,
    context: usize,
    state: MixtureState,
    spare: Option<MixtureBatch>,
    /// Given again by every call, once there is one.
    failed: Option<Error>,
}

/// A source of a [`MixtureLoader`].
#[derive(Clone, Debug)]
pub struct Source {
    /// Its windows. A source that is not drawn any more needs none.
    pub samples: Option<Samples>,
    /// See [`LoaderOptions::fingerprint`].
    pub fingerprint: Option<u64>,
}

impl From<Samples> for Source {
    fn from(samples: Samples) -> Self {
        Self { samples: Some(samples), fingerprint: None }
    }
}

/// Where a run is in a mixture: all that it needs to go on, beside the mixture and its options.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MixtureState {
    /// Samples delivered, of all sources, to all ranks.
    pub position: u64,
    /// For each source the digest of its samples: see [`LoaderState::digest`]. Missing ones are 0.
    pub digests: Vec<u64>,
}

/// A batch of a mixture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MixtureBatch {
    /// The samples.
    pub batch: TokenBatch,
    /// For each sample its source.
    pub sources: Vec<usize>,
}

impl MixtureLoader {
    /// Begins to read the sources, from where a run is. The limit of memory is shared out evenly between the sources that
    /// are drawn from there on; `fingerprint` of the options is not used, each source has its own.
    ///
    /// # Errors
    ///
    /// Those of [`Loader::new`], and [`Error::BadMixture`] unless there is a source for each weight, if one that is drawn
    /// has no samples, if contexts differ, or if the number of ranks does not divide the group.
    pub fn new(
        mixture: &Mixture,
        sources: &[Source],
        options: &LoaderOptions,
        state: &MixtureState,
    ) -> Result<Self> {
        let share = options.share;
        share.check()?;
        if sources.len() != mixture.sources() {
            return Err(bad(
                "sources",
                format!("one for each of {} weights", mixture.sources()),
                sources.len(),
            ));
        }
        if !mixture.group.is_multiple_of(share.world) {
            let expected = format!("a number that divides the mixture's group of {}", mixture.group);
            return Err(bad("ranks", expected, share.world));
        }
        let mut digests = state.digests.clone();
        digests.resize(sources.len(), 0);
        let mut drawn = Vec::new();
        for (index, source) in sources.iter().enumerate() {
            match &source.samples {
                _ if !mixture.draws_from(index, state.position) => drawn.push(None),
                Some(samples) => drawn.push(Some(samples)),
                None => {
                    return Err(bad("a source that is drawn", "samples", format!("none for source {index}")));
                }
            }
        }
        let contexts = || drawn.iter().flatten().map(|samples| samples.context());
        let context = contexts().next().unwrap_or(0);
        if let Some(found) = contexts().find(|&found| found != context) {
            return Err(bad("the context of all sources", context, found));
        }
        let batch = options.batch;
        if batch == 0 {
            return Err(Error::BadBatch { batch, context });
        }
        let limit = options.ram_bytes.unwrap_or_else(|| memory::available().bytes / 2);
        let loaders = drawn.iter().zip(sources).zip(mixture.taken(state.position)).zip(&digests);
        let loaders = loaders.map(|(((samples, source), position), &digest)| {
            let options = LoaderOptions {
                batch: 1,
                ram_bytes: Some(limit / drawn.iter().flatten().count() as u64),
                batches_ahead: options.batches_ahead.saturating_mul(batch),
                fingerprint: source.fingerprint,
                ..options.clone()
            };
            samples
                .map(|samples| Loader::new(samples, &options, LoaderState { position, digest }))
                .transpose()
        });
        let loaders = loaders.collect::<Result<Vec<_>>>()?;
        let draws = mixture.draws(state.position);
        let state = MixtureState { position: state.position, digests };
        Ok(Self { draws, loaders, share, batch, context, state, spare: None, failed: None })
    }

    /// The next batch; blocks until it is there.
    ///
    /// # Errors
    ///
    /// Those of [`Loader::next`] of the source whose sample it is. After an error every call gives it again.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator of results would invite `collect` on an endless one"
    )]
    pub fn next(&mut self) -> Result<MixtureBatch> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let batch = self.fill();
        self.failed = batch.as_ref().err().cloned();
        batch
    }

    fn fill(&mut self) -> Result<MixtureBatch> {
        let (position, batch) = (self.state.position, self.batch);
        let after =
            (batch as u64).checked_mul(self.share.world).and_then(|count| position.checked_add(count));
        let after = after.ok_or(Error::BadPosition { position, batch })?;
        let MixtureBatch { batch: mut filled, mut sources } = self.spare.take().unwrap_or_default();
        filled.tokens.clear();
        filled.targets.clear();
        sources.clear();
        let share = self.share;
        let mut digests = self.state.digests.clone();
        let draws = self.draws.by_ref().take((after - position) as usize);
        for draw in draws.filter(|draw| draw.position % share.world == share.rank) {
            let Some(loader) = &mut self.loaders[draw.source] else {
                unreachable!("a source that is drawn has a loader")
            };
            let sample = loader.next()?;
            filled.tokens.extend_from_slice(&sample.tokens);
            filled.targets.extend_from_slice(&sample.targets);
            sources.push(draw.source);
            loader.recycle(sample);
            digests[draw.source] = loader.state().digest;
        }
        self.state = MixtureState { position: after, digests };
        let batch = TokenBatch { batch, context: self.context, position: after, ..filled };
        Ok(MixtureBatch { batch, sources })
    }

    /// Gives a batch back, so that its buffers are used again.
    pub fn recycle(&mut self, batch: MixtureBatch) {
        self.spare = Some(batch);
    }

    /// Where the run is, once all batches that were taken are used.
    pub fn state(&self) -> MixtureState {
        self.state.clone()
    }

    /// Ends it, as [`Loader::finish`] does for each source.
    ///
    /// # Errors
    ///
    /// [`Error::WriteSums`], after all sources have ended.
    pub fn finish(self) -> Result<MixtureState> {
        let ended: Vec<_> = self.loaders.into_iter().flatten().map(Loader::finish).collect();
        ended.into_iter().collect::<Result<Vec<_>>>()?;
        Ok(self.state)
    }

    /// What the source's loader did so far, if it is drawn.
    pub fn report(&self, source: usize) -> Option<LoaderReport> {
        self.loaders.get(source)?.as_ref().map(Loader::report)
    }

    /// Seconds that [`next`](Self::next) stood waiting for samples, in total.
    pub fn wait_seconds(&self) -> f64 {
        self.loaders.iter().flatten().map(Loader::wait_seconds).sum()
    }
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

fn bad(what: &'static str, expected: impl ToString, found: impl ToString) -> Error {
    Error::BadMixture { what, expected: expected.to_string(), found: found.to_string() }
}
