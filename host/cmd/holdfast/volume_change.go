package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host/agent/control"
	"holdfast/internal/display"
)

func newVolumeModify(io streams, p *globalFlags) *cobra.Command {
	namespace, wait := "", time.Duration(0)
	var list []string
	c := &cobra.Command{
		Use: "modify ID --parameter KEY=VALUE", Short: "Change mutable parameters of a volume",
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, args []string) error {
			parameters, err := assignments("--parameter", list)
			if err == nil && parameters == nil {
				err = usageError{errors.New("--parameter is required, for example --parameter tier=gold")}
			}
			if err != nil {
				return err
			}
			name := volumeName(namespace, args[0])
			flags := "modify"
			for _, one := range list {
				flags += " --parameter " + display.Quote(one)
			}
			v, err := callUntilSignal(c, p, wait,
				fmt.Sprintf("the modification of volume %s may continue; to check: %s; to resume: %s", name,
					volumeCommand("status", name), volumeCommand(flags, name)),
				func(ctx context.Context, client *control.Client) (control.Volume, error) {
					return client.ModifyVolume(ctx, name, parameters)
				})
			return show(io, p, err, v, writeModified)
		},
	}
	namespaceFlag(c, &namespace)
	waitFlag(c, &wait)
	c.Flags().StringArrayVar(&list, "parameter", nil,
		"mutable parameter of the plugin, as key=value; may be repeated; others stay as they are")
	return c
}

func writeModified(to writer, v control.Volume) error {
	_, err := fmt.Fprintf(to, "volume %s: %s\n", v.VolumeName(), parameterList(v.Mutable))
	return err
}

// parameterList formats parameters in one line, in the order of their names.
func parameterList(parameters map[string]string) string {
	list := make([]string, 0, len(parameters))
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		list = append(list, display.Quote(key+"="+parameters[key]))
	}
	return strings.Join(list, " ")
}

// mutableFacts returns the fact about the mutable parameters of a volume, if it has any.
func mutableFacts(v control.Volume) []any {
	if len(v.Mutable) == 0 {
		return nil
	}
	return []any{"Mutable parameters", parameterList(v.Mutable)}
}
