package host

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/proto/wire"
)

// The errors of calls that no shim has answered have the codes that a CSI client expects.
func TestCSIClientsGetCodesOfCSI(t *testing.T) {
	for err, want := range map[error]codes.Code{
		fmt.Errorf("held: %w", context.DeadlineExceeded): codes.DeadlineExceeded,
		fmt.Errorf("held: %w", context.Canceled):         codes.Canceled,
		ErrUnavailable:                                   codes.Unavailable,
		ErrUncertain:                                     codes.Unavailable,
	} {
		if got := status.Code(csiStatus(err)); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}

// A call is final once the shim says in the trailer that it has answered. Before that it is repeated.
func TestPassedCallIsFinalOnceItIsAnswered(t *testing.T) {
	for _, c := range []struct {
		name     string
		messages int
		err      error
		trailer  bool
		answered bool
		code     codes.Code
	}{
		{"one message", 1, nil, true, true, codes.OK},
		{"a stream", 3, nil, true, true, codes.OK},
		{"the plugin's error", 0, status.Error(codes.NotFound, "no"), true, true, codes.NotFound},
		{"a shim that has ended", 0, status.Error(codes.Unavailable, "no"), false, false, codes.Unavailable},
		{"a stream that was cut off", 2, status.Error(codes.Unavailable, "no"), false, false, codes.Unavailable},
	} {
		t.Run(c.name, func(t *testing.T) {
			var plugins []string
			conn := serveUnknown(t, func(_ any, s grpc.ServerStream) error {
				in, _ := metadata.FromIncomingContext(s.Context())
				plugins = in.Get(wire.EndpointPlugin)
				if err := s.RecvMsg(&emptypb.Empty{}); err != nil {
					return err
				}
				for range c.messages {
					if err := s.SendMsg(&emptypb.Empty{}); err != nil {
						return err
					}
				}
				if c.trailer {
					s.SetTrailer(metadata.Pairs(wire.EndpointAnswered, "true"))
				}
				return c.err
			})
			ctx := metadata.AppendToOutgoingContext(t.Context(), wire.EndpointPlugin, "disk")
			got := 0
			answered, err := passTo(ctx, conn, "/csi.v1.Later/Invented", &emptypb.Empty{},
				func(*emptypb.Empty) error { got++; return nil })
			want := c.messages
			if c.err != nil && want > 0 {
				want-- // the last message is kept until the status
			}
			if answered != c.answered || status.Code(err) != c.code || got != want {
				t.Errorf("answered %v, %v, %d messages; want %v, %s, %d", answered, err, got, c.answered, c.code, want)
			}
			if len(plugins) != 1 || plugins[0] != "disk" {
				t.Errorf("the header names plugins %q", plugins)
			}
		})
	}
}

// serveUnknown returns a connection to a server that has no services.
func serveUnknown(t *testing.T, handler grpc.StreamHandler) *grpc.ClientConn {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.UnknownServiceHandler(handler), grpc.WaitForHandlers(true))
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		server.Stop()
		<-done
	})
	return conn
}
