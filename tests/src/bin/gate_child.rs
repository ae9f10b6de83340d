//! Another process that uses a ledger, for the gate's suite to race with and to kill.
//!
//! `gate_child hold LEDGER` redeems a permit, prints its ticket and holds it until it is killed.
//! `gate_child loop LEDGER N` decides and settles N times, printing each ticket once it is settled.

use std::{
    env,
    error::Error,
    io::{self, Read as _, Write as _},
    path::PathBuf,
};

use kvmig_gate::{Decision, Gate, Policy};
use kvmig_tests::gate::{artifact, candidate, evidence, quality, request};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args_os().skip(1);
    let command = arguments.next().ok_or("which command?")?;
    let ledger = PathBuf::from(arguments.next().ok_or("which ledger?")?);
    let gate = Gate::open(Policy::default(), &ledger)?;
    let loaded = artifact(1);
    let evidence = evidence(&loaded, 30);
    let request = request(&[candidate("ridge", &loaded, &evidence)]);
    let redeem = || -> Result<_, Box<dyn Error>> {
        let Decision::Migrate { permit, .. } = gate.decide(&request)? else {
            return Err("refused".into());
        };
        Ok(permit.redeem(&loaded, request.cache, request.target)?)
    };
    let say = |line: &dyn std::fmt::Display| -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{line}")?;
        out.flush()
    };
    match command.to_str() {
        Some("hold") => {
            let redeemed = redeem()?;
            say(redeemed.ticket())?;
            // Standard input never ends: the parent keeps it open until after the kill.
            io::stdin().read_to_end(&mut Vec::new())?;
            redeemed.fail("nobody killed this")?;
        }
        Some("loop") => {
            let rounds: u32 = arguments.next().and_then(|n| n.to_str()?.parse().ok()).ok_or("how many rounds?")?;
            for _ in 0..rounds {
                let (migrated, receipt) = redeem()?.complete(());
                migrated.release();
                say(&gate.settle(receipt, &quality(0.01))?.ticket)?;
            }
        }
        _ => return Err("hold or loop?".into()),
    }
    Ok(())
}
