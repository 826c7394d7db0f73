//! The `ballast.` parameters of the kernel command line.

#[derive(Debug, Default, PartialEq)]
pub struct Parameters {
    pub run: Vec<String>,
    pub then: Then,
    pub reporting_order: Option<u32>,
}

#[derive(Debug, Default, PartialEq, Clone, Copy)]
pub enum Then {
    #[default]
    Idle,
    PowerOff,
}

impl Parameters {
    pub fn parse(text: &str) -> Parameters {
        let mut parameters = Parameters::default();
        for word in words(text) {
            let Some((name, value)) =
                word.strip_prefix("ballast.").and_then(|rest| rest.split_once('='))
            else {
                continue;
            };
            match name {
                "then" if value == "poweroff" => parameters.then = Then::PowerOff,
                "reporting_order" => parameters.reporting_order = value.parse().ok(),
                _ if name
                    .strip_prefix("run")
                    .is_some_and(|n| n.parse::<u32>().is_ok() || n.is_empty()) =>
                {
                    parameters.run.push(value.to_owned());
                }
                _ => {}
            }
        }
        parameters
    }
}

/// Splits at white space, but not between double quotes; the quotes are dropped, as the kernel does.
pub fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quoted = false;
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            c if c.is_whitespace() && !quoted => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            c => word.push(c),
        }
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_are_quoted_words() {
        let p = Parameters::parse(
            "console=ttyS0 ballast.run=\"toucher --min-mb 4\" quiet ballast.run2=idle \
             ballast.then=poweroff ballast.reporting_order=5 ballast.runny=no\n",
        );
        assert_eq!(p.run, ["toucher --min-mb 4", "idle"]);
        assert_eq!(p.then, Then::PowerOff);
        assert_eq!(p.reporting_order, Some(5));
    }

    #[test]
    fn the_kernel_may_move_the_quote_before_the_name() {
        let p = Parameters::parse("\"ballast.run=idle --mb 3\" ballast.then=idle");
        assert_eq!(p.run, ["idle --mb 3"]);
        assert_eq!(p.then, Then::Idle);
    }

    #[test]
    fn nothing_asked_for_is_nothing() {
        assert_eq!(Parameters::parse("quiet ballast.reporting_order=x"), Parameters::default());
    }
}
