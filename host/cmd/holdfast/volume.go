package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/registry"
)

func newVolume(p *program) *cobra.Command {
	return group("volume", "Manage volumes",
		newVolumeCreate(p, "create", "Create volumes", (*control.Client).CreateVolume),
		newVolumeCreate(p, "register", "Register existing volumes", (*control.Client).RegisterVolume),
		newList(p, "volumes", (*control.Client).Volumes, writeVolumes, (*control.Client).VolumesAt, writePluginVolumes),
		newVolumeStatus(p), newVolumeExpand(p), newVolumeModify(p), newVolumeDetach(p),
		newVolumeUpdate(p), newVolumeAdopt(p),
		newDelete(p, "volume", "delete", "Delete unused volumes", volumeName, (*control.Client).DeleteVolume),
		newDelete(p, "volume", "deregister", "Remove the records of unused volumes; the plugin keeps the volumes",
			volumeName, (*control.Client).DeregisterVolume))
}

func newVolumeCreate(p *program, verb, short string,
	do func(*control.Client, context.Context, control.Submission) (control.Volume, error)) *cobra.Command {
	v, wait, node := &variables{}, time.Duration(0), ""
	c := &cobra.Command{
		Use: verb + " FILE...", Short: short,
		RunE: func(c *cobra.Command, args []string) error {
			list, err := v.submissions(args, true)
			if err != nil {
				return err
			}
			return each(list, func(src control.Submission) error {
				again := "run the command again with the same input"
				if src.Name != "-" {
					again = "run with the same flags: " + display.Command("holdfast volume "+verb, src.Name)
				}
				owner := map[string]string{"create": "plugin", "register": "agent"}[verb]
				hint := fmt.Sprintf("the %s may still %s the volume; to resume, %s; "+
					"to see its state: holdfast volume list; "+
					"to remove its record: holdfast volume deregister --namespace=NAMESPACE ID", owner, verb, again)
				ctx, client, stop := p.interruptible(c, wait)
				defer stop()
				client.OnNode = node
				vol, err := do(client, ctx, src)
				return show(p, withHint(err, hint), vol,
					writeCreated(map[string]string{"create": "created by", "register": "registered with"}[verb]))
			})
		},
	}
	v.flags(c)
	waitFlag(c, &wait)
	c.Flags().StringVar(&node, "node", "", "node of the cluster that stores the volume; overrides node in the file")
	return c
}

// writeCreated returns a function that reports a created volume. verb is "created by" or "registered with".
func writeCreated(verb string) func(io.Writer, control.Volume) error {
	return func(to io.Writer, v control.Volume) error {
		for _, d := range v.Warnings {
			fmt.Fprintln(to, d)
		}
		_, err := fmt.Fprintf(to, "volume %s %s plugin %s (external ID %s)\n", v.VolumeName(), verb, v.Plugin,
			v.External)
		return err
	}
}

func volumeName(namespace, id string) host.VolumeName {
	return host.VolumeName{Namespace: registry.Namespace(namespace), ID: registry.VolumeID(id)}
}

func newVolumeStatus(p *program) *cobra.Command {
	namespace := ""
	c := &cobra.Command{
		Use: "status [ID]", Short: "List volumes, or show one with its users",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				list, err := p.client().Volumes(c.Context(), "")
				return show(p, err, list, writeVolumes)
			}
			client := p.client()
			v, err := client.Volume(c.Context(), volumeName(namespace, args[0]))
			if err == nil {
				v = withUsage(c.Context(), client, v)
			}
			return show(p, err, v, writeVolume)
		},
	}
	namespaceFlag(c, "volume", &namespace)
	return c
}

// usageTimeout bounds how long the status of a volume waits for its usage.
const usageTimeout = 2 * time.Second

// withUsage adds the usage of the volume, or the reason why it is unknown. Only a volume that is mounted here has
// usage.
func withUsage(ctx context.Context, client *control.Client, v control.Volume) control.Volume {
	if !v.Mounted() {
		return v
	}
	ctx, cancel := context.WithTimeoutCause(ctx, usageTimeout,
		fmt.Errorf("no answer from the agent within %v", usageTimeout))
	defer cancel()
	client.Wait = usageTimeout - usageTimeout/10 // so that the agent's error arrives before the client's own timeout
	usage, err := client.VolumeStats(ctx, v.VolumeName())
	if err != nil {
		v.Unmeasured = err.Error()
		return v
	}
	if now, err := client.Volume(ctx, v.VolumeName()); err == nil {
		v = now // with the health that the plugin has reported just now
	}
	if v.Usage = usage; len(usage) == 0 {
		v.Unmeasured = "the plugin reports no usage"
	}
	return v
}

func writeVolumes(to io.Writer, list []control.Volume) error {
	t := newTable("NAMESPACE", "ID", "PLUGIN", "STATE", "CAPACITY", "ATTACH", "STAGE", "USERS")
	for _, v := range list {
		state := string(v.State)
		if v.Health.Abnormal() {
			state += ", unhealthy"
		}
		t.add(v.Namespace, v.ID, v.Plugin, state, display.Size(v.Capacity), v.Attached, v.Staged, len(v.Holders))
	}
	return t.write(to, "no volumes")
}

func writeVolume(to io.Writer, v control.Volume) error {
	var about factList
	about.add("ID", v.ID, "Namespace", v.Namespace, "Name", v.Name, "Plugin", v.Plugin, "External ID",
		string(v.External), "State", v.State)
	switch {
	case v.CloneID != "":
		about.add("Filled from", fmt.Sprintf("volume %s (external ID %s)", v.CloneID, v.Source.Volume))
	case v.Source != (registry.Source{}):
		about.add("Filled from", v.Source.String())
	}
	if v.Origin != (registry.Origin{}) {
		about.add("Created for", fmt.Sprintf("volume block %s of job %s, group %s", v.Origin.Request, v.Origin.Job,
			v.Origin.Group))
	}
	if v.DeleteWith != "" {
		about.add("To be deleted with", "alloc "+short(v.DeleteWith))
	}
	about.addKnown("Node", string(v.Node))
	if len(v.Accessible) > 0 {
		about.add("Accessible from", registry.Topologies(v.Accessible))
	}
	about.add("Capacity", display.Size(v.Capacity))
	about.addKnown("Mutable parameters", parameterList(v.Mutable))
	about.addUsage(v)
	about.addContainers(v)
	call := callText(v.Intent)
	if v.Intent != nil && v.Intent.Detail != "" {
		call += ": " + v.Intent.Detail
	}
	about.add("Attach", v.Attached, "Stage", v.Staged, "Staged at", v.StagedAt, "Open call", call,
		"Known since", when(v.Since))
	err := columns(to, about)
	err = errors.Join(err, writeNotices(to, v.Notices))
	modes := newTable("ACCESS MODE", "ATTACHMENT MODE")
	for _, c := range v.Capabilities {
		modes.add(c.Access, c.Attachment)
	}
	users := newTable("ALLOC", "JOB", "REQUEST", "ACCESS", "READ-ONLY", "PUBLISH", "SINCE")
	for _, h := range v.Holders {
		job := cmp.Or(h.Job, h.EngineNames())
		if h.Node != "" {
			job = fmt.Sprintf("on node %s", h.Node)
		}
		users.add(short(h.Alloc), job, h.Request, h.Access, yesNo(h.ReadOnly), h.Published, age(h.Since))
	}
	fmt.Fprintln(to)
	err = errors.Join(err, modes.write(to, "no capabilities"))
	if len(v.Attachments) > 0 {
		attached := newTable("ATTACHED TO", "NODE ID", "STATE", "DETACH ASKED BY", "ASKED")
		for _, a := range v.Attachments {
			attached.add(a.Node, a.NodeID, a.State, a.DetachingBy, when(a.DetachingSince))
		}
		fmt.Fprintln(to)
		err = errors.Join(err, attached.write(to, ""))
	}
	fmt.Fprintln(to)
	return errors.Join(err, users.write(to, "not in use"))
}

// addContainers adds the containers of engines that use a volume.
func (l *factList) addContainers(v control.Volume) {
	for _, h := range v.Holders {
		l.addKnown("Mounted by", h.EngineNames())
		var ids []string
		for _, id := range h.Containers {
			ids = append(ids, id[:min(12, len(id))])
		}
		l.addKnown("Containers", strings.Join(ids, ", "))
	}
}

// addUsage adds the usage of a volume.
func (l *factList) addUsage(v control.Volume) {
	names := map[string]string{"bytes": "Used", "inodes": "Inodes used"}
	for _, u := range v.Usage {
		if u.Unit != "bytes" && u.Total == 0 && u.Used == 0 && u.Available == 0 {
			continue // a file system without a limit of inodes, such as btrfs
		}
		l.add(cmp.Or(names[u.Unit], "Used ("+clean(u.Unit)+")"), usageText(u))
	}
	if v.Unmeasured != "" {
		l.add("Used", "unknown: "+v.Unmeasured)
	}
}

// usageText formats the usage of a unit.
func usageText(u host.VolumeUsage) string {
	amount := func(n int64) string { return fmt.Sprint(n) }
	if u.Unit == "bytes" {
		amount = display.Bytes
	}
	if u.Used == 0 && u.Available == 0 {
		return fmt.Sprintf("unknown, of %s", amount(u.Total)) // a block device (CSI NodeGetVolumeStats)
	}
	percent := ""
	if u.Total > 0 {
		percent = fmt.Sprintf(" (%.0f%%)", 100*float64(u.Used)/float64(u.Total))
	}
	return fmt.Sprintf("%s of %s%s, %s free", amount(u.Used), amount(u.Total), percent, amount(u.Available))
}

func newVolumeExpand(p *program) *cobra.Command {
	namespace, size, limit, wait := "", "", "", time.Duration(0)
	c := &cobra.Command{
		Use: "expand ID --size SIZE", Short: "Expand a volume",
		RunE: func(c *cobra.Command, args []string) error {
			want, err := rangeOf(size, limit)
			if err != nil {
				return err
			}
			name := volumeName(namespace, args[0])
			command := "expand --size " + display.Quote(size)
			if limit != "" {
				command += " --limit " + display.Quote(limit)
			}
			ctx, client, stop := p.interruptible(c, wait)
			defer stop()
			v, err := client.ExpandVolume(ctx, name, want)
			return show(p, withHint(err, mayContinue("expansion", name, command)), v, writeExpanded)
		},
	}
	namespaceFlag(c, "volume", &namespace)
	waitFlag(c, &wait)
	c.Flags().StringVar(&size, "size", "", "minimum size: 2GiB (2^30), 2GB (10^9), or bytes")
	c.Flags().StringVar(&limit, "limit", "", "maximum size")
	return c
}

// mayContinue says how to check whether the change of a volume continues, and that command resumes it.
func mayContinue(change string, name host.VolumeName, command string) string {
	return fmt.Sprintf("the %s of volume %s may continue; to check: %s; to resume: %s", change, name,
		control.VolumeCommand("status", name), control.VolumeCommand(command, name))
}

// rangeOf parses the flags --size and --limit.
func rangeOf(size, limit string) (want host.CapacityRange, err error) {
	if size == "" {
		return want, usageError{errors.New("--size is required, for example --size 2GiB")}
	}
	if want.Required, err = sizeFlag("size", size); err == nil && limit != "" {
		want.Limit, err = sizeFlag("limit", limit)
	}
	return want, err
}

// sizeFlag parses a size that is not 0.
func sizeFlag(flag, value string) (int64, error) {
	bytes, err := registry.ParseSize(value)
	if err == nil && bytes == 0 {
		err = errors.New("is not above 0")
	}
	if err != nil {
		return 0, badFlag(flag, " %q %v; write 2GiB (2^30), 2GB (10^9), or bytes", value, err)
	}
	return bytes, nil
}

func writeExpanded(to io.Writer, v control.Volume) error {
	bytes := v.Capacity
	if v.Expansion.Pending() {
		bytes = max(bytes, v.Expansion.Node.Required)
	}
	_, err := fmt.Fprintf(to, "volume %s: %s\n", v.VolumeName(), display.Size(bytes))
	pending := slices.DeleteFunc(v.Notices, func(n control.Notice) bool { return n.Kind != control.NoticePending })
	return errors.Join(err, writeNotices(to, pending))
}
