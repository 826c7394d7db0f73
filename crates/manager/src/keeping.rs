//! A VM that is paged keeps its RAM to itself: whoever else maps it reads what is away as zeros. So its VMM is asked, before
//! the first page is taken, to give the RAM file to no other process from then on (ADR 36).

use std::sync::Arc;

use ballast_pager::mappings::Kept;

use crate::looks::Past;
use crate::past;
use crate::vm::Vm;

/// Asks once; where there was no answer, again at the next look: what has another process by then is seen there, too. False: it
/// may have the RAM already, and the VM is not to be paged.
pub async fn ask(vm: &Vm, past: &mut Past) -> bool {
    if past.is_kept {
        return true;
    }
    let way = vm.paged().as_ref().map(|paged| {
        let ram = paged.memory().backend();
        (Arc::clone(ram.mappings()), ram.parts().next().map(|(part, _)| (part.base, part.len)))
    });
    let Some((mappings, Some((addr, len)))) = way else { return true };
    // It waits for the VMM.
    let asked = tokio::task::spawn_blocking(move || mappings.keep(addr, len.bytes())).await;
    past::note_kept(vm, past, asked.unwrap_or(Kept::Unknown))
}
