package main

import (
	"encoding/json"
	"fmt"
)

// The types below have the fields of Liqo's and Kubernetes' types, in their order.

type objectReference struct {
	Kind            string `json:"kind"`
	Namespace       string `json:"namespace"`
	Name            string `json:"name"`
	UID             string `json:"uid"`
	APIVersion      string `json:"apiVersion"`
	ResourceVersion string `json:"resourceVersion"`
	FieldPath       string `json:"fieldPath"`
}

type localObjectReference struct {
	Name string `json:"name"`
}

type serviceType string

type protocol string

type serverEndpoint struct {
	Port           int32       `json:"port"`
	Ports          []int32     `json:"ports"`
	ServiceType    serviceType `json:"serviceType"`
	NodePort       *int32      `json:"nodePort"`
	NodePorts      []int32     `json:"nodePorts"`
	LoadBalancerIP *string     `json:"loadBalancerIP"`
}

type serverSpec struct {
	ServerTemplateRef  objectReference      `json:"serverTemplateRef"`
	MTU                int                  `json:"mtu"`
	Endpoint           serverEndpoint       `json:"endpoint"`
	SecretRef          localObjectReference `json:"secretRef"`
	ServiceAnnotations map[string]string    `json:"serviceAnnotations"`
	ServiceLabels      map[string]string    `json:"serviceLabels"`
}

type clientEndpoint struct {
	Addresses []string  `json:"addresses"`
	Port      int32     `json:"port"`
	Protocol  *protocol `json:"protocol"`
	Ports     []int32   `json:"ports"`
}

type clientSpec struct {
	ClientTemplateRef objectReference      `json:"clientTemplateRef"`
	MTU               int                  `json:"mtu"`
	Endpoint          clientEndpoint       `json:"endpoint"`
	SecretRef         localObjectReference `json:"secretRef"`
}

// templateData is what a template sees.
type templateData[Spec any] struct {
	Spec       Spec
	Name       string
	Namespace  string
	GatewayUID string
	ClusterID  string
	SecretName string
}

func variables(gw gateway) (any, error) {
	switch gw.Kind {
	case "GatewayServer":
		return dataOf(gw, func(spec serverSpec) string { return spec.SecretRef.Name })
	case "GatewayClient":
		return dataOf(gw, func(spec clientSpec) string { return spec.SecretRef.Name })
	}
	return nil, fmt.Errorf("kind %q is no gateway", gw.Kind)
}

func dataOf[Spec any](gw gateway, secretName func(Spec) string) (any, error) {
	var spec Spec
	if err := json.Unmarshal(gw.Spec, &spec); err != nil {
		return nil, err
	}
	return templateData[Spec]{
		Spec:       spec,
		Name:       gw.Metadata.Name,
		Namespace:  gw.Metadata.Namespace,
		GatewayUID: gw.Metadata.UID,
		ClusterID:  gw.Metadata.Labels["liqo.io/remote-cluster-id"],
		SecretName: secretName(spec),
	}, nil
}
