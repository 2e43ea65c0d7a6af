package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/mount"
	"holdfast/registry"
)

func newEndpoint(p *program) *cobra.Command {
	return &cobra.Command{
		Use: "csi-endpoint PLUGIN SOCKET", Short: "Serve a plugin's CSI services on a socket until interrupted",
		Long: `Serve the CSI services of a plugin on a unix socket, for any CSI client, until
interrupted.

The socket stays the same while instances of the plugin come and go and while
the shim or the agent is replaced. Calls that change a volume or delete a
snapshot that is registered in Holdfast fail with FAILED_PRECONDITION.`,
		RunE: func(c *cobra.Command, args []string) error {
			ctx, stop := withSignals(c.Context())
			defer stop()
			plugin, err := registry.ParsePluginID(args[0])
			if err != nil {
				return usageError{err}
			}
			client := p.client()
			if _, err := client.Plugin(ctx, args[0]); err != nil {
				return err
			}
			l, err := listenCSI(args[1])
			if err != nil {
				return err
			}
			fmt.Fprintf(p.out, "serving the CSI services of plugin %s on %s\n", plugin, args[1])
			return forwardCSI(ctx, client, plugin, l, p.errs)
		},
	}
}

// listenCSI creates the socket, to which only this user may connect. It replaces the socket of a dead process.
func listenCSI(path string) (net.Listener, error) {
	answers, err := mount.RemoveStaleSocket(path)
	switch {
	case err != nil:
		return nil, err
	case answers:
		return nil, registry.Errorf(registry.ErrConflict, "another process is listening on %s", path)
	}
	before := unix.Umask(0o177) // other users may have access to the directory
	defer unix.Umask(before)
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("socket of the CSI endpoint: %w", err)
	}
	return l, nil
}

// acceptPause is the pause after an error of accept.
const acceptPause = time.Second

// forwardCSI connects each client of l to the agent, until ctx ends.
func forwardCSI(
	ctx context.Context, agent *control.Client, plugin host.PluginID, l net.Listener, log io.Writer,
) error {
	var clients sync.WaitGroup
	defer clients.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	defer l.Close()
	for {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("socket of the CSI endpoint: %w", err)
		case err != nil: // for example EMFILE; the client stays in the queue of the socket
			fmt.Fprintln(log, "holdfast: cannot accept a client, trying again:", err)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(acceptPause):
			}
			continue
		}
		clients.Go(func() {
			if err := forwardConn(ctx, agent, plugin, conn); err != nil && ctx.Err() == nil {
				fmt.Fprintln(log, "holdfast: a client was not served:", err)
			}
		})
	}
}

// forwardConn copies bytes between a client and the agent until one of them closes the connection or ctx ends.
func forwardConn(ctx context.Context, agent *control.Client, plugin host.PluginID, client net.Conn) error {
	defer client.Close()
	served, err := agent.DialCSI(ctx, plugin)
	if err != nil {
		return err
	}
	defer served.Close()
	end := func() { _, _ = client.Close(), served.Close() }
	stop := context.AfterFunc(ctx, end)
	defer stop()
	var back sync.WaitGroup
	back.Go(func() {
		defer end()
		_, _ = io.Copy(client, served) // ends when either side closes
	})
	_, _ = io.Copy(served, client)
	end()
	back.Wait()
	return nil
}

func newPluginUses(p *program) *cobra.Command {
	return &cobra.Command{
		Use: "uses PLUGIN", Short: "List the volumes that clients of the CSI endpoint use",
		RunE: func(c *cobra.Command, args []string) error {
			uses, err := p.client().EndpointUses(c.Context(), args[0])
			return show(p, err, uses, writeEndpointUses)
		},
	}
}

func writeEndpointUses(to io.Writer, uses []host.EndpointUse) error {
	t := newTable("VOLUME", "CALL", "TARGET", "NODE", "SINCE")
	for _, u := range uses {
		t.add(u.Volume.External, u.Call, u.Target, u.Node, age(u.Since))
	}
	return t.write(to, "no client uses a volume")
}

func newPluginForget(p *program) *cobra.Command {
	confirm := ""
	c := &cobra.Command{
		Use: "forget PLUGIN VOLUME --confirm VOLUME", Short: "Forget that a client of the CSI endpoint uses a volume",
		Long: `When clients of the CSI endpoint are gone for good, remove the records of how
they use a volume.

No CSI call is sent: what is attached or mounted stays. Holdfast can use the
volume afterwards. If a client still uses it then, data may be lost. VOLUME is
the ID of the volume at the plugin.`,
		RunE: func(c *cobra.Command, args []string) error {
			err := p.client().ForgetEndpointUses(c.Context(), args[0], args[1], confirm)
			return showLine(p, err, map[string]string{"plugin": args[0], "volume": args[1]},
				"uses of volume %s forgotten", clean(args[1]))
		},
	}
	c.Flags().StringVar(&confirm, "confirm", "", "the ID of the volume again, to accept that data may be lost")
	return c
}
