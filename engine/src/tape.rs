//! [`Tape`]: what a forward pass leaves behind for its backward pass.
//!
//! Each operation (in `ops`) submits its computation, saves what its backward will need with the offload runtime, and
//! pushes a node: a closure that turns gradients of its outputs into gradients of its inputs. Backward pops the nodes
//! in reverse; a node's saved tensors are free as soon as it has run.
//!
//! A segment that the policy recomputes saves its input alone and pushes one node, which runs the segment again on a
//! tape of its own and then that tape's backward. Dropout is a function of (seed, step, site), so the second run draws
//! the same masks.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    fmt::{self, Display},
    rc::Rc,
};

use ebbtide_kernels::{Op, Slice, op::Dropout};
use ebbtide_offload::{Activation, Placement, Role, Saved, SegmentPlan};

use crate::{Engine, Error, HeadLoss, Result};

/// A contiguous device slice with a shape, made on a tape. Cloning is cheap and shares the memory.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub(crate) id: u64,
    pub(crate) slice: Slice,
    pub(crate) shape: Vec<usize>,
}

impl Tensor {
    /// The memory.
    pub fn slice(&self) -> &Slice {
        &self.slice
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Rows of the last axis, and its length.
    pub(crate) fn rows_and_width(&self) -> (usize, usize) {
        let width = self.shape.last().copied().unwrap_or(1).max(1);
        (self.slice.len() / width, width)
    }
}

/// How an operation gets one of its saved tensors back.
#[derive(Clone)]
pub(crate) enum Input<'m> {
    /// From the offload runtime.
    Saved(Saved),
    /// By making it again.
    Rerun(Recipe<'m>),
}

/// Makes a tensor again from others.
pub(crate) type Recipe<'m> = Rc<dyn Fn(&Engine) -> Result<Slice> + 'm>;

impl Input<'_> {
    pub(crate) fn load(&self, engine: &Engine) -> Result<Slice> {
        match self {
            Input::Saved(saved) => Ok(engine.offload().load(saved)?),
            Input::Rerun(recipe) => recipe(engine),
        }
    }
}

type NodeFn<'m> = Box<dyn FnOnce(&mut Backward) -> Result<()> + 'm>;

/// Looks at everything that a tape makes, and remembers the first tensor that is not finite. Each look waits for the device:
/// for finding out why a model overflows, not for training.
#[derive(Clone, Default)]
pub struct Watch(Rc<RefCell<Option<String>>>);

impl Watch {
    /// The first tensor that was not finite, if there was one.
    pub fn first(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    fn look(&self, engine: &Engine, slice: &Slice, name: impl FnOnce() -> String) {
        if self.0.borrow().is_none() && engine.is_finite(slice).is_ok_and(|finite| !finite) {
            *self.0.borrow_mut() = Some(name());
        }
    }
}

/// A forward pass being recorded, or just run.
pub struct Tape<'m> {
    engine: Engine,
    recording: bool,
    /// Each with the scope that it was recorded in, where that is watched.
    nodes: Vec<(String, NodeFn<'m>)>,
    watch: Option<Watch>,
    scope: Vec<String>,
    segment: Option<String>,
    recipes: HashMap<u64, Recipe<'m>>,
    ids: Rc<Cell<u64>>,
    /// What [`Tape::once`] has done in this forward pass.
    done: Rc<RefCell<HashSet<String>>>,
    seed: u64,
    step: u32,
}

impl<'m> Tape<'m> {
    /// A tape that records, for training. `seed` and `step` key the dropout: two forward passes of a run never share a
    /// step.
    pub fn train(engine: &Engine, seed: u64, step: u32) -> Self {
        engine.offload().begin_forward(step);
        Self::new(engine, true, seed, step)
    }

    /// A tape that records nothing and drops nothing out, for evaluation.
    pub fn eval(engine: &Engine) -> Self {
        Self::new(engine, false, 0, 0)
    }

    fn new(engine: &Engine, recording: bool, seed: u64, step: u32) -> Self {
        Tape {
            engine: engine.clone(),
            recording,
            nodes: Vec::new(),
            watch: None,
            scope: Vec::new(),
            segment: None,
            recipes: HashMap::new(),
            ids: Rc::default(),
            done: Rc::default(),
            seed,
            step,
        }
    }

    /// Looks at everything that is made from here on.
    pub fn watch(&mut self, watch: &Watch) {
        self.watch = Some(watch.clone());
    }

    /// The engine it runs on.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Whether a backward pass can follow: the losses that accumulate gradients do so only then.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// A tensor over memory that was filled without the tape; no gradient flows into it.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shape does not hold as many elements as the slice.
    pub fn constant(&mut self, slice: Slice, shape: &[usize]) -> Result<Tensor> {
        if shape.iter().product::<usize>() != slice.len() {
            let expected = format!("a shape of {} elements", slice.len());
            return Err(Error::Shape { op: "constant", expected, found: format!("{shape:?}") });
        }
        Ok(self.tensor(slice, shape.to_vec()))
    }

    /// Runs `body` with `name` as a prefix of the names of what it saves.
    ///
    /// # Errors
    /// Those of `body`.
    pub fn scope<R>(&mut self, name: impl Display, body: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.scope.push(name.to_string());
        let result = body(self);
        self.scope.pop();
        result
    }

    /// Runs `effect` at most once a forward pass under a name, however often the code around it runs: for running statistics
    /// and their like in a segment that may be recomputed.
    ///
    /// # Errors
    /// Those of `effect`.
    pub fn once(&mut self, name: impl Display, effect: impl FnOnce(&Engine) -> Result<()>) -> Result<()> {
        let name = self.name(&name.to_string());
        if self.done.borrow().contains(&name) {
            return Ok(());
        }
        effect(&self.engine)?;
        self.done.borrow_mut().insert(name);
        Ok(())
    }

    /// A piece of the model that a policy may recompute. `body` must be a function of its input, of parameters that do
    /// not change before backward, and of the tape's dropout keys; what else it does belongs in [`Tape::once`].
    ///
    /// # Errors
    /// Those of `body`; in backward, [`Error::NotReproducible`] if the second run's output has another shape, or if
    /// [`ebbtide_offload::OffloadOptions::verify_recompute`] is set, other values.
    pub fn segment<F>(&mut self, name: impl Display, input: Tensor, body: F) -> Result<Tensor>
    where
        F: Fn(&mut Tape<'m>, Tensor) -> Result<Tensor> + 'm,
    {
        let name = name.to_string();
        let plan = match self.recording {
            true => self.engine.offload().segment(&name),
            false => SegmentPlan::Run,
        };
        let outer = self.segment.replace(name.clone());
        self.scope.push(name.clone());
        let result = match plan {
            SegmentPlan::Run => body(self, input),
            SegmentPlan::Recompute => self.checkpoint(name, input, body),
            SegmentPlan::RunIfRoom => self.run_if_room(name, input, body),
        };
        self.scope.pop();
        self.segment = outer;
        result
    }

    /// Runs a segment; if there is no room for what it saves, undoes that and checkpoints it.
    fn run_if_room<F>(&mut self, name: String, input: Tensor, body: F) -> Result<Tensor>
    where
        F: Fn(&mut Tape<'m>, Tensor) -> Result<Tensor> + 'm,
    {
        let (nodes, ids) = (self.nodes.len(), self.ids.get());
        match body(self, input.clone()) {
            Err(Error::Device(ebbtide_kernels::Error::OutOfMemory(_))) => {
                self.nodes.truncate(nodes);
                self.recipes.retain(|id, _| *id <= ids);
                self.engine.offload().note_recompute_fallback();
                self.checkpoint(name, input, body)
            }
            result => result,
        }
    }

    fn checkpoint<F>(&mut self, name: String, input: Tensor, body: F) -> Result<Tensor>
    where
        F: Fn(&mut Tape<'m>, Tensor) -> Result<Tensor> + 'm,
    {
        let saved = self.save(&input, "input", Role::Boundary)?;
        let (input_id, input_shape) = (input.id, input.shape.clone());
        self.recording = false;
        let output = body(self, input);
        self.recording = true;
        let output = output?;
        // What comes back with loss gives something else.
        let verifies = self.engine.offload().options().verify_recompute && !saved.is_lossy();
        let (output_id, first) = (output.id, Fingerprint::of(&self.engine, &output, verifies)?);
        let (seed, step, ids, done, scope) =
            (self.seed, self.step, self.ids.clone(), self.done.clone(), self.scope.clone());
        self.push(move |backward| {
            let Some(gradient) = backward.take(output_id) else { return Ok(()) };
            let engine = backward.engine.clone();
            engine.offload().note_recompute();
            let mut tape = Tape::new(&engine, true, seed, step);
            tape.watch = backward.watch.clone();
            (tape.ids, tape.done, tape.scope, tape.segment) = (ids, done, scope, Some(name.clone()));
            let slice = engine.offload().load(&saved)?;
            // The body may write it, and saves what it needs of it itself.
            drop(saved);
            let again = Tensor { id: tape.next_id(), slice, shape: input_shape };
            let again_id = again.id;
            let output = body(&mut tape, again)?;
            let second = Fingerprint::of(&engine, &output, verifies)?;
            if first != second {
                let (first, second) = (first.to_string(), second.to_string());
                return Err(Error::NotReproducible { segment: name, first, second });
            }
            let gradients = HashMap::from([(output.id, gradient)]);
            let watch = backward.watch.clone();
            let mut inner = Backward { engine, gradients, watch, scope: String::new() };
            drop(output);
            tape.run_backward(&mut inner)?;
            match inner.take(again_id) {
                Some(gradient) => backward.give(input_id, gradient),
                None => Ok(()),
            }
        });
        Ok(output)
    }

    /// The backward pass of a loss: parameters' gradients accumulate, and everything that was saved is free after.
    /// It consumes the tape: a second backward cannot be written.
    ///
    /// # Errors
    /// The device's, and those of recomputed segments. What was saved is free all the same.
    pub fn backward(self, loss: HeadLoss) -> Result<()> {
        self.engine.offload().begin_backward();
        let gradients = loss.gradient.into_iter().collect();
        let (engine, watch) = (self.engine.clone(), self.watch.clone());
        let mut backward = Backward { engine, gradients, watch, scope: String::new() };
        self.run_backward(&mut backward)
    }

    fn run_backward(mut self, backward: &mut Backward) -> Result<()> {
        self.recipes.clear();
        while let Some((scope, node)) = self.nodes.pop() {
            backward.scope = scope;
            node(backward)?;
        }
        Ok(())
    }

    pub(crate) fn push(&mut self, node: impl FnOnce(&mut Backward) -> Result<()> + 'm) {
        debug_assert!(self.recording, "only a recording tape takes nodes");
        let scope = if self.watch.is_some() { self.name("") } else { String::new() };
        self.nodes.push((scope, Box::new(node)));
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.ids.set(self.ids.get() + 1);
        self.ids.get()
    }

    pub(crate) fn tensor(&self, slice: Slice, shape: Vec<usize>) -> Tensor {
        if let Some(watch) = &self.watch {
            watch.look(&self.engine, &slice, || slice.name().to_string());
        }
        Tensor { id: self.next_id(), slice, shape }
    }

    /// The name that a tensor saved here goes by.
    pub(crate) fn name(&self, leaf: &str) -> String {
        let mut name = self.scope.join("/");
        if !name.is_empty() {
            name.push('/');
        }
        name + leaf
    }

    pub(crate) fn save(&mut self, tensor: &Tensor, leaf: &str, role: Role) -> Result<Saved> {
        let name = self.name(leaf);
        let activation = Activation {
            name: &name,
            shape: &tensor.shape,
            dtype: tensor.slice.dtype(),
            role,
            segment: self.segment.as_deref(),
            rerun: false,
        };
        Ok(self.engine.offload().save(tensor.slice.clone(), &activation)?)
    }

    /// Saves an operation's input, or takes its recipe where there is one and the policy would rather rerun it.
    pub(crate) fn save_input(&mut self, tensor: &Tensor, leaf: &str, role: Role) -> Result<Input<'m>> {
        if let Some(recipe) = self.recipes.get(&tensor.id) {
            return Ok(Input::Rerun(recipe.clone()));
        }
        Ok(Input::Saved(self.save(tensor, leaf, role)?))
    }

    /// Asks the policy whether a tensor should be made again rather than saved; if so, `recipe` is how.
    pub(crate) fn offer_recipe(
        &mut self,
        tensor: &Tensor,
        leaf: &str,
        role: Role,
        recipe: impl FnOnce() -> Recipe<'m>,
    ) {
        let name = self.name(leaf);
        let activation = Activation {
            name: &name,
            shape: &tensor.shape,
            dtype: tensor.slice.dtype(),
            role,
            segment: self.segment.as_deref(),
            rerun: true,
        };
        if self.engine.offload().placement(&activation) == Placement::Rerun {
            self.engine.offload().note_rerun(tensor.slice.bytes());
            self.recipes.insert(tensor.id, recipe());
        }
    }

    /// The key of a dropout site, or `None` where nothing is dropped.
    pub(crate) fn dropout(&self, site: DropoutSite) -> Option<Dropout> {
        let DropoutSite { probability, site } = site;
        (probability > 0.0 && self.step > 0).then_some(Dropout {
            probability,
            seed: self.seed,
            site,
            step: self.step,
        })
    }
}

/// What a segment's two runs must have in common.
#[derive(PartialEq)]
struct Fingerprint {
    shape: Vec<usize>,
    /// Of the values, where they are to be verified.
    checksum: Option<u64>,
}

impl Fingerprint {
    fn of(engine: &Engine, output: &Tensor, verifies: bool) -> Result<Self> {
        let checksum = match verifies {
            true => Some(engine.checksum(&output.slice)?),
            false => None,
        };
        Ok(Fingerprint { shape: output.shape.clone(), checksum })
    }
}

impl Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "of shape {:?}", self.shape)?;
        self.checksum.map_or(Ok(()), |checksum| write!(f, " and checksum {checksum:016x}"))
    }
}

/// A place in a model where dropout happens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DropoutSite {
    /// Share of elements dropped in training.
    pub probability: f32,
    /// Unique within the model.
    pub site: u32,
}

/// A backward pass under way: gradients by tensor.
pub struct Backward {
    pub(crate) engine: Engine,
    gradients: HashMap<u64, Slice>,
    watch: Option<Watch>,
    /// Of the node that runs, where that is watched.
    scope: String,
}

impl Backward {
    /// The gradient of a tensor, if anything has contributed to it.
    pub(crate) fn take(&mut self, id: u64) -> Option<Slice> {
        self.gradients.remove(&id)
    }

    /// Adds a contribution to the gradient of a tensor. The slice may be shared with other tensors' gradients: whoever
    /// writes in place makes it its own first ([`Engine::owned`]).
    pub(crate) fn give(&mut self, id: u64, gradient: Slice) -> Result<()> {
        if let Some(watch) = &self.watch {
            watch.look(&self.engine, &gradient, || format!("{}{} (a gradient)", self.scope, gradient.name()));
        }
        let Some(sum) = self.gradients.remove(&id) else {
            self.gradients.insert(id, gradient);
            return Ok(());
        };
        let sum = self.engine.owned(sum)?;
        self.engine.submit(Op::Add { input: gradient, out: sum.clone() })?;
        self.gradients.insert(id, sum);
        Ok(())
    }
}
