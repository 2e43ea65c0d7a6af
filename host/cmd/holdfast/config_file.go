package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/agext/levenshtein"
	"github.com/hashicorp/hcl/v2"
	"github.com/hashicorp/hcl/v2/hclsyntax"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/zclconf/go-cty/cty"
	"github.com/zclconf/go-cty/cty/convert"
)

// outsideConfig are the flags of the agent without a key in its configuration file.
var outsideConfig = []string{"address", "config", "help", "json", "recover"}

// configKeys returns the flag for each key of the configuration file. A key is the name of its flag, with underscores.
func configKeys(c *cobra.Command) map[string]*pflag.Flag {
	keys := map[string]*pflag.Flag{}
	add := func(f *pflag.Flag) {
		if !slices.Contains(outsideConfig, f.Name) {
			keys[strings.ReplaceAll(f.Name, "-", "_")] = f
		}
	}
	c.LocalFlags().VisitAll(add)
	c.InheritedFlags().VisitAll(add)
	return keys
}

// flagPlaces maps flags to the keys of a configuration file that set them, with their places in the file.
type flagPlaces map[string]string

// locate adds the key that has set a flag to an error about the flag's value.
func (p flagPlaces) locate(err error) error {
	if usage, is := errors.AsType[usageError](err); is {
		if bad, is := usage.error.(*flagError); is {
			bad.key = p[bad.flag]
		}
	}
	return err
}

// readConfig sets flags to the values in the configuration file. Flags of the command line and variables of the
// environment have precedence. It returns the text of the cluster block, and the places of the values.
func readConfig(c *cobra.Command, path string) (cluster string, places flagPlaces, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", nil, fmt.Errorf("configuration file: %w", readError(path, err))
	}
	file, diags := hclsyntax.ParseConfig(text, path, hcl.InitialPos)
	if diags.HasErrors() {
		return "", nil, usageError{diags}
	}
	body := file.Body.(*hclsyntax.Body)
	for _, b := range body.Blocks {
		if b.Type != "cluster" {
			continue // JustAttributes reports it
		}
		if cluster != "" {
			return "", nil, usageError{fmt.Errorf("%s: there is a cluster block already", b.DefRange())}
		}
		// The empty lines make errors of the shim have the line numbers of the file.
		cluster = strings.Repeat("\n", b.Range().Start.Line-1) + string(b.Range().SliceBytes(text)) + "\n"
	}
	body.Blocks = slices.DeleteFunc(body.Blocks, func(b *hclsyntax.Block) bool { return b.Type == "cluster" })
	attributes, diags := body.JustAttributes()
	if diags.HasErrors() {
		return "", nil, usageError{diags}
	}
	places, err = setFlags(c, attributes)
	return cluster, places, err
}

// setFlags sets flags to the attributes of a configuration file.
func setFlags(c *cobra.Command, attributes hcl.Attributes) (flagPlaces, error) {
	keys, places := configKeys(c), flagPlaces{}
	for name, a := range attributes {
		flag, at := keys[name], a.Expr.Range()
		if flag == nil {
			return places, usageError{fmt.Errorf("%s: unknown key %q%s", a.NameRange, name, suggestKey(name, keys))}
		}
		value, diags := a.Expr.Value(nil)
		if diags.HasErrors() {
			return places, usageError{diags}
		}
		text, err := convert.Convert(value, cty.String)
		if err != nil || text.IsNull() {
			return places, usageError{fmt.Errorf("%s: %s has to be a string, a number or a boolean", at, name)}
		}
		if flag.Changed || flag.Name == "state-dir" && flag.DefValue != "" { // set by HOLDFAST_STATE_DIR
			continue
		}
		if err := flag.Value.Set(text.AsString()); err != nil {
			return places, usageError{fmt.Errorf("%s: %s = %q: use %s", at, name, text.AsString(), valueForm(flag))}
		}
		places[flag.Name] = fmt.Sprintf("%s: %s", at, name)
	}
	return places, nil
}

// suggestKey names the key that was probably meant. If no key is similar, it lists all of them.
func suggestKey(name string, keys map[string]*pflag.Flag) string {
	best, least := "", len(name)/3+2
	all := slices.Sorted(maps.Keys(keys))
	for _, key := range all {
		if d := levenshtein.Distance(name, key, nil); d < least {
			best, least = key, d
		}
	}
	if best != "" {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	return "; the keys are " + strings.Join(all, ", ")
}
