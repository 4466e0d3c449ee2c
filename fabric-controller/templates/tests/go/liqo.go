package main

import (
	"bytes"
	"fmt"
	"reflect"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"text/template"
)

// variable finds the first action without a space inside: what decides about an optional key.
var variable = regexp.MustCompile(`{{\s*(.\S+)\s*}}`)

// object renders what Liqo takes from a template: of the metadata four fields, all as text, and
// the whole spec.
func object(tmpl map[string]any, data any) (any, error) {
	metadata, ok := tmpl["metadata"].(map[string]any)
	if !ok {
		return nil, fmt.Errorf("unable to get the metadata")
	}
	spec, ok := tmpl["spec"].(map[string]any)
	if !ok {
		return nil, fmt.Errorf("unable to get the spec")
	}
	rendered := map[string]any{}
	for _, field := range []string{"name", "namespace", "labels", "annotations"} {
		value, found := metadata[field]
		if !found && (field == "labels" || field == "annotations") {
			continue
		}
		value, err := render(value, data, true)
		if err != nil {
			return nil, fmt.Errorf("metadata.%s: %w", field, err)
		}
		rendered[field] = value
	}
	value, err := render(spec, data, false)
	if err != nil {
		return nil, fmt.Errorf("spec: %w", err)
	}
	return map[string]any{"metadata": rendered, "spec": value}, nil
}

// render renders every string in a value. With asText, nothing but strings comes out.
func render(value, data any, asText bool) (any, error) {
	switch reflect.TypeOf(value).Kind() { // A null has no type: this panics, as it does in Liqo.
	case reflect.String:
		return renderText(value.(string), data, asText)
	case reflect.Map:
		return renderMap(value.(map[string]any), data, asText)
	case reflect.Slice:
		return renderList(value.([]any), data, asText)
	}
	if asText {
		return fmt.Sprintf("%v", value), nil
	}
	return value, nil
}

func renderText(text string, data any, asText bool) (any, error) {
	parsed, err := template.New("").Parse(text)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := parsed.Execute(&out, data); err != nil {
		return nil, err
	}
	if number, err := strconv.Atoi(out.String()); err == nil && !asText {
		return number, nil
	}
	return out.String(), nil
}

// renderMap differs from Liqo in one point: Liqo changes the map that it walks, so that what
// happens to a key with an optional twin depends on luck. Here the optional one comes last.
func renderMap(fields map[string]any, data any, asText bool) (any, error) {
	for field := range fields {
		asText = asText || field == "labels" || field == "annotations"
	}
	rendered := map[string]any{}
	for _, key := range optionalLast(fields) {
		name, value, optional := unwrap(key, fields[key])
		result, err := render(value, data, asText)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		if !optional || !reflect.ValueOf(result).IsZero() {
			rendered[name] = result
		}
	}
	return rendered, nil
}

func renderList(items []any, data any, asText bool) (any, error) {
	rendered := make([]any, 0, len(items))
	for i, item := range items {
		result, err := render(item, data, asText)
		if err != nil {
			return nil, fmt.Errorf("%d: %w", i, err)
		}
		rendered = append(rendered, result)
	}
	return rendered, nil
}

// unwrap returns the name and value of a field whose key may be an optional one.
func unwrap(key string, value any) (string, any, bool) {
	if !strings.HasPrefix(key, "?") {
		return key, value, false
	}
	text := value.(string) // Panics on anything else, as it does in Liqo.
	if found := variable.FindStringSubmatch(text); found != nil {
		return key[1:], fmt.Sprintf("{{if %s}}%s{{end}}", found[1], text), true
	}
	return key, value, false
}

func optionalLast(fields map[string]any) []string {
	keys := make([]string, 0, len(fields))
	for key := range fields {
		keys = append(keys, key)
	}
	sort.Slice(keys, func(i, j int) bool {
		a, b := strings.HasPrefix(keys[i], "?"), strings.HasPrefix(keys[j], "?")
		if a != b {
			return b
		}
		return keys[i] < keys[j]
	})
	return keys
}
