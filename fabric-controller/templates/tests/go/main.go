// The oracle renders gateway templates with Go's own text/template, by Liqo's rules. It reads
// gateways and cases from stdin and prints the outcome of each case to stdout, as JSON.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
)

// gateway is a GatewayServer or a GatewayClient.
type gateway struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name      string            `json:"name"`
		Namespace string            `json:"namespace"`
		UID       string            `json:"uid"`
		Labels    map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec json.RawMessage `json:"spec"`
}

type input struct {
	Gateways map[string]gateway `json:"gateways"`
	Cases    []struct {
		Name     string         `json:"name"`
		Gateway  string         `json:"gateway"`
		Template map[string]any `json:"template"`
	} `json:"cases"`
}

// outcome is what one case became: a value, or Go's error.
type outcome struct {
	Name  string `json:"name"`
	Value any    `json:"value,omitempty"`
	Error string `json:"error,omitempty"`
}

func main() {
	decoder := json.NewDecoder(os.Stdin)
	decoder.UseNumber()
	var in input
	if err := decoder.Decode(&in); err != nil {
		log.Fatal(err)
	}
	outcomes := make([]outcome, 0, len(in.Cases))
	for _, c := range in.Cases {
		data, err := variables(in.Gateways[c.Gateway])
		if err != nil {
			log.Fatalf("%s: %v", c.Name, err)
		}
		outcomes = append(outcomes, attempt(c.Name, c.Template, data))
	}
	if err := json.NewEncoder(os.Stdout).Encode(outcomes); err != nil {
		log.Fatal(err)
	}
}

// attempt turns a panic into an error: the controller-runtime around Liqo's code does the same.
func attempt(name string, template map[string]any, data any) (result outcome) {
	result.Name = name
	defer func() {
		if cause := recover(); cause != nil {
			result.Value, result.Error = nil, fmt.Sprint("panic: ", cause)
		}
	}()
	value, err := object(numbers(template).(map[string]any), data)
	if err != nil {
		result.Error = err.Error()
		return result
	}
	result.Value = value
	return result
}

// numbers makes numbers what they are in unstructured objects: int64 if they fit, else float64.
func numbers(value any) any {
	switch value := value.(type) {
	case json.Number:
		if whole, err := value.Int64(); err == nil {
			return whole
		}
		fraction, _ := value.Float64()
		return fraction
	case map[string]any:
		for key := range value {
			value[key] = numbers(value[key])
		}
	case []any:
		for i := range value {
			value[i] = numbers(value[i])
		}
	}
	return value
}
