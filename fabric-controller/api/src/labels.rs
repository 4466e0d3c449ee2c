//! Label and annotation keys, spelled as Liqo spells them.

/// Peer of an object; the key by which everything is looked up.
pub const REMOTE_CLUSTER_ID: &str = "liqo.io/remote-cluster-id";
/// `true` on the namespace of a peering.
pub const TENANT_NAMESPACE: &str = "liqo.io/tenant-namespace";
/// `true` on key Secrets and PublicKeys.
pub const GATEWAY_RESOURCE: &str = "networking.liqo.io/gateway-resource";
/// [`GATEWAY`] on a gateway's Deployment and its pods.
pub const COMPONENT: &str = "networking.liqo.io/component";
pub const GATEWAY: &str = "gateway";
/// Name and namespace of a gateway, on all that it consists of.
pub const GATEWAY_NAME: &str = "networking.liqo.io/gateway-name";
pub const GATEWAY_NAMESPACE: &str = "networking.liqo.io/gateway-namespace";
/// `true` on the pod of a gateway that has the tunnel.
pub const ACTIVE: &str = "networking.liqo.io/active";
/// Uid of a gateway's pod, on the pod itself once the gateway has several. Its Service selects by it the one that has
/// the tunnel.
pub const REPLICA: &str = "fabric.weft.dev/replica";
/// Annotation of a gateway's pods: uid of the ServiceAccount whose token they have. One that is made anew makes new pods.
pub const SERVICE_ACCOUNT: &str = "fabric.weft.dev/service-account";
/// `pod` or `external`, on a Network that a Configuration owns.
pub const CIDR_TYPE: &str = "configuration.liqo.io/cidr-type";
/// One of [`NETWORK_TYPES`], on the cluster's own Networks.
pub const NETWORK_TYPE: &str = "ipam.liqo.io/network-type";
/// Its values. All but `external-cidr-v6` are Liqo's, whose tools expect one external CIDR.
pub const NETWORK_TYPES: [&str; 6] =
    ["pod-cidr", "service-cidr", "external-cidr", "external-cidr-v6", "internal-cidr", "reserved"];
/// Any value but `false`: the Network gets the CIDR of its spec or none.
pub const NETWORK_NOT_REMAPPED: &str = "ipam.liqo.io/network-not-remapped";
/// `true`: the Network may overlap other shared ones.
pub const NETWORK_SHARED: &str = "ipam.liqo.io/network-shared";
/// `true` on an IP: no remapping for it.
pub const HOST_UNREACHABLE: &str = "networking.liqo.io/host-unreachable";
/// `virtual-node` on Liqo's virtual nodes, which carry no traffic.
pub const NODE_TYPE: &str = "liqo.io/type";
/// `true` on pods that run in another cluster and have their likeness here.
pub const SHADOW_POD: &str = "liqo.io/shadowPod";
/// Cluster that an object was reflected from.
pub const REFLECTED_FROM: &str = "offloading.liqo.io/origin";
/// [`SHADOW_SLICE`] on EndpointSlices that Liqo makes from those of another cluster.
pub const REFLECTED_BY: &str = "liqo.io/managed-by";
pub const SHADOW_SLICE: &str = "shadowendpointslice";
/// Annotation of a ShadowEndpointSlice: addresses of clusters that another peering leads to.
pub const DIRECT_CONNECTIONS: &str = "liqo.io/direct-connections-data";
/// [`VIRTUAL_KUBELET`] on pods of virtual kubelets, and the name of their virtual node.
pub const OFFLOADING_COMPONENT: &str = "offloading.liqo.io/component";
pub const VIRTUAL_KUBELET: &str = "virtual-kubelet";
pub const VIRTUAL_NODE: &str = "liqo.io/virtual-node";
/// Label of the ConfigMap that names the cluster; value [`CLUSTER_ID_APP`].
pub const APP_NAME: &str = "app.kubernetes.io/name";
pub const CLUSTER_ID_APP: &str = "clusterid-configmap";
/// Label of what weft makes for itself, which distinguishes its own objects from the user's.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
pub const WEFT: &str = "weft";
/// Field manager of what the fabric-controller writes in Kubernetes beyond the store's own kinds.
pub const CONTROLLER_MANAGER: &str = "weft-fabric-controller";
/// Chart to which an object belongs.
pub const PART_OF: &str = "app.kubernetes.io/part-of";
/// `true` on IPs that weft makes for Liqo's other modules.
pub const FOR_LIQO: &str = "fabric.weft.dev/for-liqo";
/// Label of an IP for a module of Liqo: what it stands for, [`API_SERVER`] or [`API_SERVER_PROXY`].
pub const IP_TYPE: &str = "ipam.liqo.io/ip-type";
pub const API_SERVER: &str = "api-server";
pub const API_SERVER_PROXY: &str = "api-server-proxy";
/// Annotation: `true` on what Liqo's own chart would have made.
pub const PREINSTALLED: &str = "liqo.io/preinstalled";
/// Label of the IP of a pod that runs in another cluster.
pub const OFFLOADED_POD_NAME: &str = "offloading.liqo.io/pod-name";
pub const OFFLOADED_POD_NAMESPACE: &str = "offloading.liqo.io/pod-namespace";

/// The API group of most of Liqo's networking resources.
pub const NETWORKING_GROUP: &str = "networking.liqo.io";

/// The namespace of the cluster's own objects.
pub const LIQO_NAMESPACE: &str = "liqo";
/// Name of the ConfigMap that names the cluster, and the key of its data.
pub const CLUSTER_ID_CONFIGMAP: &str = "liqo-clusterid-configmap";
pub const CLUSTER_ID_KEY: &str = "CLUSTER_ID";
/// Program that a pod of the chart runs.
pub const PROGRAM: &str = "fabric.weft.dev/program";
/// Annotation of a Node manifest: `true` if its addresses hold whatever its devices have.
pub const PIN_ADDRESSES: &str = "fabric.weft.dev/pin-addresses";
