package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"holdfast/host/agent/control"
	"holdfast/internal/display"
	"holdfast/registry"
)

// show writes an answer as JSON or as text.
func show[T any](p *program, err error, v T, write func(io.Writer, T) error) error {
	switch {
	case err != nil:
		return err
	case p.json:
		return writeJSON(p.out, v)
	}
	return write(p.out, v)
}

// showLine writes an answer as JSON or as a line of text.
func showLine[T any](p *program, err error, v T, format string, args ...any) error {
	return show(p, err, v, func(to io.Writer, _ T) error {
		_, err := fmt.Fprintf(to, format+"\n", args...)
		return err
	})
}

// statusCommand returns a command that lists objects. With an argument it shows the object with that name.
func statusCommand[T any](
	p *program, short string,
	list func(*control.Client, context.Context) ([]T, error), writeList func(io.Writer, []T) error,
	get func(*control.Client, context.Context, string) (T, error), write func(io.Writer, T) error,
) *cobra.Command {
	return &cobra.Command{
		Use: "status [ID]", Short: short, Aliases: []string{"list"},
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				all, err := list(p.client(), c.Context())
				return show(p, err, all, writeList)
			}
			v, err := get(p.client(), c.Context(), args[0])
			return show(p, err, v, write)
		},
	}
}

// listFunc lists the objects of a plugin, or all if the plugin is empty.
type listFunc[T any] func(c *control.Client, ctx context.Context, plugin string) ([]T, error)

// newList returns a command that lists objects with a record or, with --external, those that a plugin has. If atPlugin
// is nil, the command has no --external.
func newList[T, E any](p *program, objects string, list listFunc[T], write func(io.Writer, []T) error,
	atPlugin listFunc[E], writeExternal func(io.Writer, []E) error) *cobra.Command {
	plugin, external, wait := "", "", time.Duration(0)
	c := &cobra.Command{
		Use: "list", Short: "List " + objects,
		RunE: func(c *cobra.Command, _ []string) error {
			client := p.client()
			client.Wait = wait
			if external != "" {
				found, err := atPlugin(client, c.Context(), external)
				return show(p, err, found, writeExternal)
			}
			known, err := list(client, c.Context(), plugin)
			return show(p, err, known, write)
		},
	}
	c.Flags().StringVar(&plugin, "plugin", "", "list only "+objects+" of this plugin")
	if atPlugin != nil {
		c.Flags().StringVar(&external, "external", "",
			"ask this plugin for all its "+objects+", including those without a record")
		excludeFlags(c, "plugin", "external")
		waitFlag(c, &wait)
	}
	return c
}

// newDelete returns a command that deletes or deregisters objects. kind is the name of the parent command, and name
// returns the name of an object.
func newDelete[N fmt.Stringer](p *program, kind, verb, short string, name func(namespace, id string) N,
	do func(*control.Client, context.Context, N) error) *cobra.Command {
	namespace, wait := "", time.Duration(0)
	noun := strings.ReplaceAll(kind, "-", " ")
	c := &cobra.Command{
		Use: verb + " ID...", Short: short,
		RunE: func(c *cobra.Command, args []string) error {
			name := name(namespace, args[0])
			hint := interruptedDelete(verb, fmt.Sprintf("%s %s", noun, name),
				display.ObjectCommand("holdfast "+kind+" status", registry.Namespace(namespace), args[0]))
			ctx, client, stop := p.interruptible(c, wait)
			defer stop()
			err := withHint(do(client, ctx, name), hint)
			return showLine(p, err, map[string]string{"namespace": namespace, "id": args[0]}, "%s %s %s", noun, name,
				map[string]string{"delete": "deleted", "deregister": "deregistered"}[verb])
		},
	}
	namespaceFlag(c, noun, &namespace)
	waitFlag(c, &wait)
	return c
}

// interruptedDelete says what happens after the interruption of a command that deletes or deregisters.
func interruptedDelete(verb, what, status string) string {
	if verb == "delete" {
		return fmt.Sprintf("%s may or may not be deleted; once its state is deleting, the deletion continues by "+
			"itself; to see the state: %s; to wait again, run the command again", what, status)
	}
	return fmt.Sprintf("the record of %s may or may not be removed; to check: %s; to resume, run the command again",
		what, status)
}

// interruptible returns a client, and a context for its calls that ends at a signal. wait is as in control.Client.
func (p *program) interruptible(c *cobra.Command, wait time.Duration) (
	ctx context.Context, client *control.Client, stop func()) {
	client = p.client()
	client.Wait = wait
	ctx, stop = withSignals(c.Context())
	return ctx, client, stop
}

// withHint adds a hint to the error of an interruption by a signal: what continues, and how to resume.
func withHint(err error, hint string) error {
	if by, is := errors.AsType[interrupted](err); is {
		by.text = "interrupted: " + hint
		return by
	}
	return err
}

func waitFlag(c *cobra.Command, to *time.Duration) {
	c.Flags().DurationVar(to, "wait", 30*time.Second, "how long to wait; 0 means no limit")
}

// namespaceFlag adds the flag for the namespace of an object, which is named in the flag's description.
func namespaceFlag(c *cobra.Command, object string, to *string) {
	c.Flags().StringVar(to, "namespace", string(registry.DefaultNamespace), "namespace of the "+object)
}
