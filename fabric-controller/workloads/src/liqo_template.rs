//! Templates of Liqo's own gateway, whose containers cannot run under weft. Pure.

use k8s_openapi::api::apps::v1::Deployment;

/// Arguments that only programs of Liqo's gateway have.
const ARGUMENTS: [&str; 5] = [
    "--implementation",
    "--container-name",
    "--concurrent-containers-names",
    "--gateway-uid",
    "--geneve-port",
];

/// True for an argument, rendered or not, that only programs of Liqo's gateway have.
pub fn is_argument_of_liqo(argument: &str) -> bool {
    argument.split('=').next().is_some_and(|name| ARGUMENTS.contains(&name))
}

/// Describes the first container that is one of Liqo's gateway, with the remedy.
pub(super) fn foreign_container(deployment: &Deployment) -> Option<String> {
    let containers = &deployment.spec.template.spec.as_ref()?.containers;
    containers.iter().enumerate().find_map(|(i, container)| {
        let mut arguments = container.args.iter().flatten().enumerate();
        let (j, found) = arguments.find(|(_, argument)| is_argument_of_liqo(argument))?;
        let is_wefts = container.args.iter().flatten().any(|argument| argument == "--kubernetes");
        let remedy = match is_wefts {
            true => "remove it: WireGuard is part of weft's gateway, in userspace",
            false => {
                "use weft's template (wireguard-server or wireguard-client), or a copy of that: its \
                 gateway is one container"
            }
        };
        let field = format!("spec.template.spec.deployment.spec.template.spec.containers[{i}].args[{j}]");
        Some(format!(
            "{field}: found {found}, an argument of Liqo's gateway (container {}); {remedy}",
            container.name
        ))
    })
}
