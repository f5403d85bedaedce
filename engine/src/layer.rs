//! [`CustomLayer`]: a differentiable operation of the user's own, which says what it computes in.

use std::rc::Rc;

use ebbtide_kernels::{DType, Slice, Stream};
use ebbtide_offload::Role;

use crate::{Error, Precision, Result, Tape, Tensor, autocast::Class};

/// An operation that [`Tape::custom`] runs. Its inputs are what is saved for its backward, under `NAME.input.N`.
///
/// What it submits may be any [`ebbtide_kernels::Op`], one of the user's own
/// ([`ebbtide_kernels::op::CustomOp`]) among them.
pub trait CustomLayer {
    /// Its name, in the names of what it saves.
    fn name(&self) -> &str;

    /// What it computes in: its inputs are brought to the type that the class names, and its output is of that type. `None`
    /// computes in f32, and is noted once ([`crate::Engine::notes`]) where the engine computes in 16 bits.
    fn class(&self) -> Option<Class> {
        None
    }

    /// The shape of the output, from those of the inputs.
    ///
    /// # Errors
    /// What shapes it expects.
    fn output(&self, inputs: &[&[usize]]) -> std::result::Result<Vec<usize>, String>;

    /// Submits what overwrites `out`.
    ///
    /// # Errors
    /// The device's.
    fn forward(&self, stream: &Stream, inputs: &[Slice], out: &Slice) -> ebbtide_kernels::Result<()>;

    /// Submits what overwrites the gradient of each input, from `dout`, that of the output. All are of the layer's type.
    ///
    /// # Errors
    /// The device's.
    fn backward(
        &self,
        stream: &Stream,
        inputs: &[Slice],
        dout: &Slice,
        dinputs: &[Slice],
    ) -> ebbtide_kernels::Result<()>;
}

impl<'m> Tape<'m> {
    /// Runs a layer of the user's own.
    ///
    /// # Errors
    /// [`Error::Shape`] for shapes that it does not take; the device's.
    pub fn custom(&mut self, layer: Rc<dyn CustomLayer + 'm>, inputs: &[Tensor]) -> Result<Tensor> {
        let shapes: Vec<&[usize]> = inputs.iter().map(Tensor::shape).collect();
        let shape = layer.output(&shapes).map_err(|expected| Error::Shape {
            op: "custom",
            expected: format!("{}: {expected}", layer.name()),
            found: format!("{shapes:?}"),
        })?;
        let dtype = self.dtype_of(&*layer, inputs);
        let inputs =
            inputs.iter().map(|input| self.cast(input.clone(), dtype)).collect::<Result<Vec<_>>>()?;
        let out = self.engine().activation(shape.iter().product(), dtype, &self.name(layer.name()))?;
        let slices: Vec<Slice> = inputs.iter().map(|input| input.slice().clone()).collect();
        layer.forward(self.engine().compute(), &slices, &out)?;
        drop(slices);
        let out = self.tensor(out, shape);
        if self.is_recording() {
            let mut saved = Vec::with_capacity(inputs.len());
            for (i, input) in inputs.iter().enumerate() {
                saved.push(self.save_input(
                    input,
                    &format!("{}.input.{i}", layer.name()),
                    Role::Activation,
                )?);
            }
            let of_inputs: Vec<(u64, usize)> =
                inputs.iter().map(|input| (input.id, input.slice().len())).collect();
            let id = out.id;
            self.push(move |backward| {
                let Some(dout) = backward.take(id) else { return Ok(()) };
                let engine = backward.engine.clone();
                let inputs = saved.iter().map(|input| input.load(&engine)).collect::<Result<Vec<_>>>()?;
                drop(saved);
                let gradients = of_inputs.iter().map(|&(_, len)| engine.gradient(len, dtype, "dcustom"));
                let gradients = gradients.collect::<Result<Vec<_>>>()?;
                layer.backward(engine.compute(), &inputs, &dout, &gradients)?;
                of_inputs.iter().zip(gradients).try_for_each(|(&(id, _), dx)| backward.give(id, dx))
            });
        }
        Ok(out)
    }

    fn dtype_of(&self, layer: &dyn CustomLayer, inputs: &[Tensor]) -> DType {
        let numerics = self.engine().numerics();
        let class = layer.class().unwrap_or_else(|| {
            if numerics.precision != Precision::F32 {
                let name = layer.name();
                self.engine().note(format!("layer `{name}` states no precision class: it computes in f32"));
            }
            Class::Full
        });
        let dtypes: Vec<DType> = inputs.iter().map(|input| input.slice().dtype()).collect();
        numerics.result_of(class, &dtypes)
    }
}
