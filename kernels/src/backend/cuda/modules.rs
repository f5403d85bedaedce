//! The kernels on a device, looked up once.

use std::{collections::HashMap, ffi::CString, sync::Arc};

use super::driver::{Code, Context, Failed, Kernel, Result};
use crate::cuda::{Launch, MODULES, Module};

/// The kernels' code, loaded, and the functions that were asked for.
pub(super) struct Modules {
    loaded: Vec<(Module, Code)>,
    kernels: HashMap<&'static str, Kernel>,
}

impl Modules {
    /// Loads all, so that no step does.
    ///
    /// # Errors
    /// The driver's, if it does not take the code.
    pub(super) fn load(context: &Arc<Context>) -> Result<Self> {
        let load = |&(module, ptx): &(Module, &str)| {
            let image = CString::new(ptx).expect("PTX is text");
            let named = |failed: Failed| Failed {
                error: format!("{module:?}'s kernels: {}", failed.error),
                ..failed
            };
            Ok((module, Code::load(context, &image).map_err(named)?))
        };
        Ok(Modules { loaded: MODULES.iter().map(load).collect::<Result<_>>()?, kernels: HashMap::new() })
    }

    /// A launch's kernel.
    ///
    /// # Errors
    /// The driver's, if its module has none of the name.
    pub(super) fn kernel(&mut self, launch: &Launch) -> Result<Kernel> {
        if let Some(&kernel) = self.kernels.get(launch.kernel) {
            return Ok(kernel);
        }
        let (_, code) =
            self.loaded.iter().find(|(module, _)| *module == launch.module).expect("all are loaded");
        let kernel = code.kernel(launch.kernel)?;
        self.kernels.insert(launch.kernel, kernel);
        Ok(kernel)
    }
}
