package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agext/levenshtein"
	"github.com/spf13/cobra"

	"holdfast/host/agent/control"
	"holdfast/registry"
)

// runFunc is the function of a cobra command.
type runFunc = func(*cobra.Command, []string) error

// readOnly are the commands that accept a unique prefix instead of an ID. Other commands accept only the short IDs of
// allocs: if the object that a script names is gone, they would change another one.
var readOnly = []string{"status", "inspect", "logs", "capacity", "diff"}

// resolving returns a function that calls run. If run does not find an object, the function resolves the arguments and
// calls run again. Exact IDs thus need no further request.
func (p *program) resolving(run runFunc, listers []lister) runFunc {
	return func(c *cobra.Command, args []string) error {
		err := run(c, args)
		if !errors.Is(err, registry.ErrNotFound) {
			return err
		}
		resolved := slices.Clone(args)
		for i, arg := range args {
			list := listers[min(i, len(listers)-1)]
			if list == nil {
				continue
			}
			known, listErr := list.known(c, p, resolved[:i])
			if listErr != nil || slices.Contains(known, arg) {
				continue
			}
			like, isPrefix := similar(arg, known)
			isShortAlloc := i == 0 && c.Parent().Name() == "alloc" && len(arg) >= shortID
			switch {
			case len(like) == 0:
				return err
			case isPrefix && isShortAlloc: // the agent has found the alloc
				continue
			case !isPrefix || !slices.Contains(readOnly, c.Name()):
				return registry.Errorf(registry.ErrNotFound, "%w; did you mean %s?", err, listed(like))
			case len(like) > 1:
				return registry.Invalid("several IDs start with %q: %s", arg, listed(like))
			}
			resolved[i] = like[0]
		}
		if slices.Equal(resolved, args) {
			return err
		}
		return run(c, resolved)
	}
}

// similar returns the IDs that start with id. If there are none, it returns the IDs that differ from id only by a
// typing error.
func similar(id string, known []string) (like []string, isPrefix bool) {
	for _, k := range known {
		if strings.HasPrefix(k, id) {
			like = append(like, k)
		}
	}
	if like != nil {
		return like, true
	}
	for _, k := range known {
		if len(id) > 2 && levenshtein.Distance(id, k, nil) <= 2 {
			like = append(like, k)
		}
	}
	return like, false
}

// maxListed bounds the number of IDs in an error.
const maxListed = 10

func listed(list []string) string {
	slices.Sort(list)
	more := ""
	if len(list) > maxListed {
		list, more = list[:maxListed], fmt.Sprintf(" and %d more", len(list)-maxListed)
	}
	return strings.Join(list, ", ") + more
}

// failures holds the errors of a command that treats several arguments in the same way. All of them are reported.
type failures []error

func (f failures) Error() string   { return errors.Join(f...).Error() }
func (f failures) Unwrap() []error { return f }

// err returns nil without failures, and the only failure itself.
func (f failures) err() error {
	switch len(f) {
	case 0:
		return nil
	case 1:
		return f[0]
	}
	return f
}

// each calls do for each argument, and continues after a failure. It ends early if the remaining calls would fail in
// the same way.
func each[T any](list []T, do func(T) error) error {
	var failed failures
	for _, one := range list {
		err := do(one)
		if err == nil {
			continue
		}
		failed = append(failed, err)
		_, usage := errors.AsType[usageError](err)
		_, ended := errors.AsType[interrupted](err)
		if usage || ended || errors.Is(err, control.ErrNoAgent) {
			break
		}
	}
	return failed.err()
}
