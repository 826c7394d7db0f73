//! What the manager does to the double: every call may fail, or be its last.

use std::ops::Range;

use ballast_pager::backend::{Backend, MemError, PageBuf, Place, Remap};
use ballast_units::Ppn;

use super::{Double, HALF, Ram, Unanswered, World, page_of, token_of};

impl Backend for Ram {
    fn protect(&self, ppn: Ppn) -> Result<(), MemError> {
        self.0.call(true, |world| {
            Double::of(world, ppn, false)?;
            world.protected[ppn.index()] = true;
            Ok(())
        })
    }

    fn unprotect(&self, ppn: Ppn) -> Result<(), MemError> {
        self.0.call(true, |world| {
            Double::of(world, ppn, false)?;
            world.protected[ppn.index()] = false;
            Double::wake_in(world, ppn.0, 1);
            Ok(())
        })
    }

    fn surely_has(&self, ppn: Ppn) -> Range<u64> {
        match self.0.world().plugged {
            None => 0..u64::MAX,
            Some((first, _)) if ppn.0 < first => 0..first,
            Some((first, block)) => {
                let at = ppn.0 - (ppn.0 - first) % block;
                at..at + block
            }
        }
    }

    fn read_home(&self, ppn: Ppn, into: &mut PageBuf) -> Result<(), MemError> {
        self.0.call(false, |world| {
            into.copy_from_slice(&page_of(world.pages[ppn.index()].unwrap_or(0))[..]);
            Ok(())
        })
    }

    fn punch(&self, ppn: Ppn, n: u64) -> Result<(), MemError> {
        self.0.call(false, |world| {
            world.punch(ppn.0, n);
            Ok(())
        })
    }

    fn large(&self) -> u64 {
        self.0.world().large
    }

    fn allocate(&self, first: Ppn, n: u64) -> Result<bool, MemError> {
        self.0.call(false, |world| {
            assert!(n == world.large && first.0.is_multiple_of(n), "{first}: {n} pages");
            if let Some(has) = world.short_of.take() {
                for p in first.0..first.0 + has {
                    world.pages[p as usize] = Some(0);
                }
                return Err(MemError::NoMemory);
            }
            for p in first.0..first.0 + n {
                let p = p as usize;
                assert!(world.places[p] == Place::Home && world.pages[p].is_none());
                world.part_of[p] = Some(first.0);
                world.latent[p] = true;
            }
            Ok(true)
        })
    }

    fn collapse(&self, first: Ppn, n: u64) -> Result<bool, MemError> {
        self.0.call(false, |world| {
            assert!(n == world.large && first.0.is_multiple_of(n), "{first}: {n} pages");
            for p in first.0..first.0 + n {
                let p = p as usize;
                if world.pages[p].is_none() {
                    return Ok(false);
                }
                assert!(world.places[p] == Place::Home && !world.latent[p]);
                world.part_of[p] = Some(first.0);
            }
            Ok(true)
        })
    }

    fn protect_run(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        self.0.call(true, |world| {
            for p in (first.0..first.0 + n).map(Ppn) {
                Double::of(world, p, false)?;
                world.protected[p.index()] = true;
            }
            Ok(())
        })
    }

    fn unprotect_run(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        self.0.call(true, |world| {
            for p in (first.0..first.0 + n).map(Ppn) {
                Double::of(world, p, false)?;
                world.protected[p.index()] = false;
            }
            Double::wake_in(world, first.0, n);
            Ok(())
        })
    }

    fn zero(&self, ppn: Ppn, n: u64) -> Result<u64, MemError> {
        self.0.call(true, |world| {
            Double::of(world, ppn, true)?;
            let is_free = |p: u64| world.pages[p as usize].is_none() && !world.latent[p as usize];
            if !is_free(ppn.0) {
                return Err(MemError::Exists);
            }
            let run = (ppn.0..ppn.0 + n).take_while(|&p| is_free(p)).count() as u64;
            for p in ppn.0..ppn.0 + run {
                world.pages[p as usize] = Some(0);
                world.protected[p as usize] = false;
            }
            Double::wake_in(world, ppn.0, run);
            Ok(run)
        })
    }

    fn fill(&self, ppn: Ppn, bytes: &PageBuf) -> Result<(), MemError> {
        let token = token_of(bytes);
        self.0.call(true, |world| {
            Double::of(world, ppn, true)?;
            if world.pages[ppn.index()].is_some() || world.latent[ppn.index()] {
                return Err(MemError::Exists);
            }
            world.pages[ppn.index()] = Some(token);
            world.protected[ppn.index()] = false;
            Double::wake_in(world, ppn.0, 1);
            Ok(())
        })
    }

    fn fill_run(&self, first: Ppn, pages: &[PageBuf]) -> Result<u64, MemError> {
        let tokens: Vec<u64> = pages.iter().map(token_of).collect();
        self.0.call(true, |world| {
            for (i, &token) in tokens.iter().enumerate() {
                let p = first.index() + i;
                Double::of(world, Ppn(p as u64), true)?;
                if world.pages[p].is_some() {
                    return if i == 0 { Err(MemError::Exists) } else { Ok(i as u64) };
                }
                world.pages[p] = Some(token);
                world.protected[p] = false;
                Double::wake_in(world, p as u64, 1);
            }
            Ok(tokens.len() as u64)
        })
    }

    fn wake(&self, ppn: Ppn, n: u64) -> Result<(), MemError> {
        self.0.call(false, |world| {
            Double::wake_in(world, ppn.0, n);
            Ok(())
        })
    }

    fn next_present(&self, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        self.0.call(false, |world| {
            Ok((ppn.0..end).find(|&p| world.pages[p as usize].is_some()).unwrap_or(end))
        })
    }

    fn sees_copies(&self) -> bool {
        self.0.world().sees_copies
    }

    fn may_leave_holes(&self) -> bool {
        self.0.world().may_leave_holes
    }

    fn can_remap(&self) -> bool {
        self.0.world().can_remap
    }

    fn can_map_again(&self) -> bool {
        self.can_remap()
    }

    fn map_again(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        let run = Remap { first, n, to: Place::Home };
        if self.0.world().outstanding.is_some() {
            return Err(MemError::Again);
        }
        let is_home = |world: &World, ppn: Ppn| world.places[ppn.index()] == Place::Home;
        self.0.call(false, |world| {
            assert!(run.pages().all(|ppn| is_home(world, ppn)), "mapped again, and not home");
            world.map(&run);
            Ok(())
        })?;
        self.0.call(false, |world| {
            world.watch(&run);
            Ok(())
        })
    }

    fn remap(&self, runs: &[Remap]) -> (usize, Result<(), MemError>) {
        let double = &self.0;
        let silent = {
            let mut world = double.world();
            if world.outstanding.is_some() {
                return (0, Err(MemError::Again));
            }
            world.unanswered.take()
        };
        if let Some(how) = silent {
            let result = double.call(false, |world| {
                match how {
                    Unanswered::Later => world.outstanding = Some(runs.to_vec()),
                    Unanswered::Done => {
                        for run in runs {
                            world.finish_remap(&double.machine, run);
                        }
                        world.outstanding = Some(Vec::new());
                    }
                }
                Err(MemError::Unanswered)
            });
            return (0, result);
        }
        let together = double.world().together;
        let mut done = 0;
        while done < runs.len() {
            match self.change(&runs[done..(done + together).min(runs.len())], done) {
                (n, Ok(())) => done += n,
                (n, Err(e)) => {
                    let mut world = double.world();
                    if e == MemError::Crash && world.goes_on {
                        world.left = runs.to_vec();
                    }
                    return (done + n, Err(e));
                }
            }
        }
        (done, Ok(()))
    }

    fn places(&self, pages: &[Ppn]) -> Result<Vec<Result<Place, MemError>>, MemError> {
        self.0.call(false, |world| {
            if world.outstanding.is_some() {
                return Err(MemError::Unanswered);
            }
            Ok(pages.iter().map(|p| Ok(world.places[p.index()])).collect())
        })
    }

    fn copied(&self, first: Ppn, n: u64) -> Result<Vec<bool>, MemError> {
        self.0.call(false, |world| {
            let copies = &world.copies[first.index()..first.index() + n as usize];
            Ok(copies.iter().map(Option::is_some).collect())
        })
    }

    fn rearm(&self, ppn: Ppn) -> Result<(), MemError> {
        self.0.call(false, |world| {
            world.watched[ppn.index()] = true;
            Ok(())
        })?;
        self.protect(ppn)
    }
}

impl Ram {
    /// Runs that are mapped one after another, then watched together. How many are done whole, and
    /// what stopped the next one.
    fn change(&self, runs: &[Remap], at: usize) -> (usize, Result<(), MemError>) {
        let double = &self.0;
        let machine = &double.machine;
        let mut mapped = 0;
        let mut failed = Ok(());
        for run in runs {
            if run.to == Place::Home {
                // Page by page, so that it may end in the middle; and the page may be half there.
                failed = run.pages().try_for_each(|ppn| {
                    let one = Remap { first: ppn, n: 1, to: Place::Home };
                    let shown = double.world().shown(machine, ppn.index());
                    // A hole there would be waited for by the one thread that could end that.
                    let away = double.world().places[ppn.index()] != Place::Home;
                    assert!(away, "page {} is home", ppn.0);
                    if shown.is_some() {
                        let half = |world: &mut World| {
                            world.pages[ppn.index()] = Some(HALF);
                            Ok(())
                        };
                        double.call(false, half)?;
                    }
                    double.call(false, |world| {
                        world.save(machine, &one);
                        Ok(())
                    })
                });
            }
            failed = failed.and_then(|()| {
                double.call(false, |world| {
                    world.map(run);
                    Ok(())
                })
            });
            if failed.is_err() {
                break;
            }
            mapped += 1;
        }
        if failed == Err(MemError::Crash) {
            return (0, failed);
        }
        {
            let world = &mut *double.world();
            let is_new = |&mut (p, _): &mut (u64, u64)| world.places[p as usize] != Place::Home;
            if let Some((p, token)) = world.writes_between.take_if(is_new) {
                world.copies[p as usize] = Some(token);
            }
        }
        for (i, run) in runs[..mapped].iter().enumerate() {
            let unwatched = double.world().unwatched_from.take_if(|u| u.0 == at + i);
            if let Some((_, e)) = unwatched {
                return (i, Err(e));
            }
            let watched = double.call(false, |world| {
                world.watch(run);
                Ok(())
            });
            if watched.is_err() {
                return (i, watched);
            }
        }
        (mapped, failed)
    }
}
