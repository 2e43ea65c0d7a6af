package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/registry"
)

func newVolumeModify(p *program) *cobra.Command {
	namespace, wait := "", time.Duration(0)
	var list []string
	c := &cobra.Command{
		Use: "modify ID --parameter KEY=VALUE", Short: "Change mutable parameters of a volume",
		RunE: func(c *cobra.Command, args []string) error {
			parameters, err := assignments("--parameter", list)
			if err == nil && parameters == nil {
				err = usageError{errors.New("--parameter is required, for example --parameter tier=gold")}
			}
			if err != nil {
				return err
			}
			name := volumeName(namespace, args[0])
			command := "modify"
			for _, one := range list {
				command += " --parameter " + display.Quote(one)
			}
			ctx, client, stop := p.interruptible(c, wait)
			defer stop()
			v, err := client.ModifyVolume(ctx, name, parameters)
			err = withHint(err, mayContinue("modification", name, command))
			return showLine(p, err, v, "volume %s: %s", v.VolumeName(), parameterList(v.Mutable))
		},
	}
	namespaceFlag(c, "volume", &namespace)
	waitFlag(c, &wait)
	c.Flags().StringArrayVar(&list, "parameter", nil,
		"mutable parameter of the plugin, as key=value; may be repeated; others stay as they are")
	return c
}

// parameterList formats parameters in one line, sorted by name.
func parameterList(parameters map[string]string) string {
	list := make([]string, 0, len(parameters))
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		list = append(list, display.Quote(key+"="+parameters[key]))
	}
	return strings.Join(list, " ")
}

func newVolumeUpdate(p *program) *cobra.Command {
	v, wait, dryRun := &variables{}, time.Duration(0), false
	c := &cobra.Command{
		Use: "update FILE", Short: "Apply the changes in a volume file",
		RunE: func(c *cobra.Command, args []string) error {
			src, err := v.readOne(args[0], true)
			if err != nil {
				return err
			}
			ctx, client, stop := p.interruptible(c, wait)
			defer stop()
			done, err := client.UpdateVolume(ctx, src, dryRun)
			err = withHint(err, "the update may continue; to resume, run the command again")
			return show(p, err, done, writeUpdate(dryRun))
		},
	}
	v.flags(c)
	waitFlag(c, &wait)
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only show what would change, and what cannot")
	return c
}

// writeUpdate returns a function that prints the changes of an update.
func writeUpdate(dryRun bool) func(io.Writer, host.VolumeUpdate) error {
	return func(to io.Writer, u host.VolumeUpdate) error {
		name := u.Volume.VolumeName()
		if len(u.Changes) == 0 {
			_, err := fmt.Fprintf(to, "volume %s matches the file\n", name)
			return err
		}
		t := newTable("FIELD", "FROM", "TO", "PROBLEM")
		for _, c := range u.Changes {
			t.add(c.Field, c.From, c.To, c.Problem)
		}
		err := t.write(to, "")
		if !dryRun {
			_, wrote := fmt.Fprintf(to, "volume %s updated\n", name)
			err = errors.Join(err, wrote)
		}
		return err
	}
}

func newVolumeAdopt(p *program) *cobra.Command {
	v, f, wait := &variables{}, &adoptFlags{}, time.Duration(0)
	c := &cobra.Command{
		Use:   "adopt PLUGIN EXTERNAL_ID --id ID | adopt FILE",
		Short: "Register an existing volume; its plugin supplies size, context and topology",
		Args:  argumentCount([]string{"PLUGIN", "[EXTERNAL_ID]"}),
		RunE: func(c *cobra.Command, args []string) error {
			var src control.VolumeSubmission
			var err error
			if len(args) == 1 {
				src.Submission, err = f.readFile(c, v, args[0])
			} else {
				src.Spec, err = f.spec(args[0], args[1])
			}
			if err != nil {
				return err
			}
			ctx, client, stop := p.interruptible(c, wait)
			defer stop()
			vol, err := client.AdoptVolume(ctx, src)
			err = withHint(err, "the agent may still register the volume; to resume, run the command again")
			return show(p, err, vol, writeCreated("registered with"))
		},
	}
	namespaceFlag(c, "volume", &f.namespace)
	waitFlag(c, &wait)
	v.flags(c)
	c.Flags().StringVar(&f.id, "id", "", "ID of the volume for jobs")
	c.Flags().StringArrayVar(&f.capabilities, "capability", []string{"single-node-writer:file-system"},
		"access mode and attachment mode, as ACCESS:ATTACHMENT; may be repeated")
	c.Flags().StringArrayVar(&f.secrets, "secret", nil,
		"secret for the plugin: name=env:VARIABLE (of the agent) or name=file:PATH; may be repeated")
	return c
}

// adoptFlags are the flags of volume adopt that replace a volume file.
type adoptFlags struct {
	namespace, id         string
	capabilities, secrets []string
}

// readFile reads the volume file that is given instead of the flags.
func (f *adoptFlags) readFile(c *cobra.Command, v *variables, path string) (control.Submission, error) {
	for _, name := range []string{"namespace", "id", "capability", "secret"} {
		if c.Flags().Changed(name) {
			return control.Submission{}, usageError{
				fmt.Errorf("--%s goes with PLUGIN EXTERNAL_ID; write it into the volume file", name)}
		}
	}
	src, err := v.readOne(path, true)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w; give a volume file, or PLUGIN EXTERNAL_ID --id ID", err)
	}
	return src, err
}

// spec returns the volume that the arguments and flags describe.
func (f *adoptFlags) spec(plugin, external string) (spec *host.VolumeSpec, err error) {
	if f.id == "" {
		return nil, usageError{errors.New("--id is required, for example --id notes")}
	}
	spec = &host.VolumeSpec{Plugin: host.PluginID(plugin), External: registry.ExternalID(external),
		Namespace: registry.Namespace(f.namespace), ID: registry.VolumeID(f.id)}
	if spec.Capabilities, err = capabilityFlags(f.capabilities); err == nil {
		spec.Secrets, err = secretReferences(f.secrets)
	}
	return spec, err
}

// capabilityFlags parses the values of --capability.
func capabilityFlags(list []string) (out []registry.VolumeCapability, err error) {
	for _, text := range list {
		access, attachment, _ := strings.Cut(text, ":")
		c := registry.VolumeCapability{Access: registry.AccessMode(access),
			Attachment: registry.AttachmentMode(attachment)}
		if !slices.Contains(registry.AccessModes, c.Access) ||
			c.Attachment != registry.FileSystem && c.Attachment != registry.BlockDevice {
			return nil, usageError{fmt.Errorf("--capability %q: write ACCESS:ATTACHMENT, "+
				"for example single-node-writer:file-system or multi-node-reader-only:block-device", text)}
		}
		out = append(out, c)
	}
	return out, nil
}

func writePluginVolumes(to io.Writer, list []host.PluginVolume) error {
	t := newTable("EXTERNAL ID", "CAPACITY", "KNOWN AS", "PUBLISHED TO", "CONDITION")
	for _, v := range list {
		known, condition := "", ""
		if v.Name.ID != "" {
			known = v.Name.String()
		}
		if v.Condition != nil {
			condition = "normal"
			if v.Condition.Abnormal {
				condition = "abnormal: " + v.Condition.Text()
			}
		}
		t.add(string(v.External), display.Size(v.Capacity), known, join(v.Nodes, ", "), condition)
	}
	return t.write(to, "no volumes")
}
