package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/registry"
)

func newVolumeExpand(io streams, p *places) *cobra.Command {
	namespace, size, limit, wait := "", "", "", time.Duration(0)
	c := &cobra.Command{
		Use: "expand ID --size SIZE", Short: "Make a volume larger, also while it is used if its plugin can",
		Args: counted(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, args []string) error {
			want, err := rangeOf(size, limit)
			if err != nil {
				return err
			}
			client := p.client()
			client.Wait = wait
			v, err := client.ExpandVolume(c.Context(), host.VolumeName{Namespace: registry.Namespace(namespace), ID: registry.VolumeID(args[0])}, want)
			return show(io, p, err, v, writeExpanded)
		},
	}
	namespaceFlag(c, &namespace)
	waitFlag(c, &wait)
	c.Flags().StringVar(&size, "size", "", "how large it is to be at least: 2GiB (2^30), 2GB (10^9), or bytes")
	c.Flags().StringVar(&limit, "limit", "", "how large it may be at most")
	return c
}

// rangeOf is the sizes as a person writes them.
func rangeOf(size, limit string) (want host.CapacityRange, err error) {
	if size == "" {
		return want, usageError{errors.New("--size is required, for example --size 2GiB")}
	}
	if want.Required, err = registry.ParseSize(size); err != nil {
		return want, usageError{fmt.Errorf("--size %q %w; write 2GiB (2^30), 2GB (10^9), or bytes", size, err)}
	}
	if limit == "" {
		return want, nil
	}
	if want.Limit, err = registry.ParseSize(limit); err != nil {
		err = usageError{fmt.Errorf("--limit %q %w; write 2GiB (2^30), 2GB (10^9), or bytes", limit, err)}
	}
	return want, err
}

func writeExpanded(to writer, v control.Volume) error {
	bytes := v.Capacity
	if v.Expansion.Pending() {
		bytes = max(bytes, v.Expansion.Node.Required)
	}
	_, err := fmt.Fprintf(to, "volume %s: %s\n", v.VolumeName(), size(bytes))
	return errors.Join(err, writeGrowth(to, v.Growth))
}
