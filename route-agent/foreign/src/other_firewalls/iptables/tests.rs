use super::*;
use fabric_api::fabric::VXLAN_PORT;

fn parse(text: &str) -> Table<'static> {
    Table::parse(("iptables-legacy", FILTER), Tracked::New, text)
}

/// Changes to the FORWARD chain of a table.
fn changes(table: &str) -> String {
    let table = parse(table);
    let drops = table.drop_points("FORWARD", Hook::Forward, &[]);
    let accept = || BTreeSet::from([Accept { matches: "-i weft+".to_owned(), port: None }]);
    table.script(&drops.points.into_iter().map(|point| (point, accept())).collect())
}

const ACCEPT: &str = "-i weft+ -m comment --comment weft -j ACCEPT\n";

#[test]
fn accept_follows_all_rules_where_the_policy_drops() {
    let table = "-P FORWARD DROP\n-A FORWARD -s 10.0.0.0/8 -j DROP";
    assert_eq!(changes(table), format!("-A FORWARD {ACCEPT}"));
    assert_eq!(changes(&format!("{table}\n-A FORWARD {ACCEPT}")), "");
}

#[test]
fn accept_before_a_drop_moves_behind_it() {
    let table = format!("-P FORWARD DROP\n-A FORWARD {ACCEPT}-A FORWARD -s 10.0.0.1 -j DROP");
    assert_eq!(changes(&table), format!("-D FORWARD {ACCEPT}-A FORWARD {ACCEPT}"));
}

#[test]
fn accept_before_rules_that_drop_nothing_stays() {
    let table = format!("-P FORWARD DROP\n-A FORWARD {ACCEPT}-A FORWARD -s 10.0.0.1 -j ACCEPT");
    assert_eq!(changes(&table), "");
}

#[test]
fn accept_precedes_a_jump_to_a_chain_that_only_drops() {
    let table = "-P FORWARD ACCEPT\n-N reject\n-A FORWARD -i wan -j reject\n\
                 -A FORWARD -m comment --comment \"the \\\"rest\\\"\" -j reject\n\
                 -A reject -p tcp -j REJECT --reject-with tcp-reset\n-A reject -j DROP";
    assert_eq!(changes(table), format!("-I FORWARD 2 {ACCEPT}"));
}

#[test]
fn accept_goes_into_a_chain_that_decides_and_drops() {
    let table = "-P FORWARD ACCEPT\n-N zone\n-A FORWARD -g zone\n\
                 -A zone -s 10.0.0.1 -j DROP\n-A zone -s 10.0.0.2 -j ACCEPT\n-A zone -j REJECT";
    assert_eq!(changes(table), format!("-I zone 3 {ACCEPT}"));
}

#[test]
fn chain_of_a_pod_gets_no_accept() {
    let table = "-P FORWARD ACCEPT\n-N pod\n-A FORWARD -i cali1 -j pod\n\
                 -A pod -s 10.0.0.1 -j RETURN\n-A pod -j DROP";
    assert_eq!(changes(table), "");
}

/// Chains of INPUT that drop packets that come in by eth0.
fn dispatched(rules: &str) -> Vec<String> {
    let incoming = Some("eth0".to_owned());
    let ways = [Way { hook: Hook::Input, incoming, outgoing: None }];
    let table = parse(rules);
    let drops = table.drop_points("INPUT", Hook::Input, &ways);
    assert!(drops.points.is_empty(), "{rules}");
    let chains = drops.by_interface.into_iter().map(|point| point.chain);
    chains.filter(|_| !drops.admitted.ports.contains(&VXLAN_PORT)).collect()
}

#[test]
fn drop_for_the_underlays_device_is_found() {
    let chain =
        "-P INPUT ACCEPT\n-N wan\n-A wan -p tcp -m tcp --dport 22 -j ACCEPT\n-A wan -j DROP\n";
    for jump in ["-i eth0 -j wan", "-i eth+ -g wan", "! -i lo -j wan"] {
        assert_eq!(dispatched(&format!("{chain}-A INPUT {jump}")), ["wan"], "{jump}");
    }
    for jump in ["-i eth1 -j wan", "! -i eth0 -j wan", "-i eth0 -p tcp -j wan"] {
        assert_eq!(dispatched(&format!("{chain}-A INPUT {jump}")), [""; 0], "{jump}");
    }
    assert_eq!(dispatched("-P INPUT ACCEPT\n-A INPUT -i eth0 -j DROP"), ["INPUT"]);
    let ports = "-A wan -p udp -m multiport --dports 53,4879 -j ACCEPT\n-A wan -j DROP\n";
    let chain = "-P INPUT ACCEPT\n-N wan\n-A INPUT -i eth0 -j wan\n";
    assert_eq!(dispatched(&format!("{chain}{ports}")), [""; 0], "its owner lets it pass");
}

#[test]
fn chain_end_beyond_reach_of_the_device_is_well() {
    let table = "-P INPUT ACCEPT\n-N all\n-N one\n-A INPUT -i eth+ -j all\n\
                 -A all -i eth0 -g one\n-A all -j DROP\n-A one -p tcp -j DROP";
    assert_eq!(dispatched(table), [""; 0]);
}

/// Returns whether a rule that drops VXLAN may take some of a gateway's link on this host.
fn is_possible(link: &str, rule: &str) -> bool {
    let links = BTreeSet::from([link.parse().unwrap()]);
    let hosts = &links | &["192.0.2.5", "192.0.2.7"].map(|ip| ip.parse().unwrap()).into();
    let incoming = Some("eth0".to_owned());
    let ways = vec![Way { hook: Hook::Input, incoming, outgoing: None }];
    let treatment = Treatment { mode: Mode::Accept, ways, hosts, links, ..Treatment::default() };
    let mut found = Found::default();
    parse(&format!("-P INPUT ACCEPT\n-A INPUT {rule} -j DROP")).look(
        &[("INPUT", Hook::Input)],
        &treatment,
        &mut found,
    );
    assert!(found.problems.is_empty(), "{:?}", found.problems);
    found.drops.iter().any(|dropping| dropping.is_uncertain)
}

#[test]
fn drop_of_vxlan_not_of_nodes_may_be_a_gateways() {
    for ports in ["--dport 4879", "--dport 4800:4900", "-m multiport --dports 53,4870:4879"] {
        let rule = format!("! -s 192.0.2.0/24 -p udp -m udp {ports}");
        assert!(is_possible("169.254.7.7", &rule), "{ports}");
        assert!(!is_possible("192.0.2.66", &rule), "{ports}");
        assert!(!is_possible("fd00::7", &rule), "{ports}");
    }
    assert!(!is_possible("169.254.7.7", "! -s 192.0.2.0/24 -p udp -m udp --dport 4880:4900"));
}

#[test]
fn accept_goes_where_nothing_drops_any_more() {
    let table = format!("-P FORWARD ACCEPT\n-N zone\n-A FORWARD {ACCEPT}-A zone {ACCEPT}");
    assert_eq!(changes(&table), format!("-D FORWARD {ACCEPT}-D zone {ACCEPT}"));
}
