package launch

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/tap"
)

// A call is on its way before it is answered; and calls of which each is made once the one before is on its way arrive in that order.
func TestCallsArriveInTheOrderInWhichTheyWereSent(t *testing.T) {
	var arrived []string // by one goroutine: the reader of the one connection
	answer := make(chan struct{})
	server := grpc.NewServer(grpc.InTapHandle(func(ctx context.Context, info *tap.Info) (context.Context, error) {
		arrived = append(arrived, info.Header.Get("name")[0])
		return ctx, nil
	}))
	grpc_health_v1.RegisterHealthServer(server, slow{answer: answer})
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(l)
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithStatsHandler(sentTeller{}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const calls = 50
	ended := make(chan error, calls)
	for i := range calls {
		sent := make(chan struct{})
		go func() { ended <- named(OnSent(t.Context(), func() { close(sent) }), conn, i) }()
		<-sent // while nothing is answered
	}
	close(answer)
	for range calls {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	server.Stop()
	for i, name := range arrived {
		if name != string(rune('A'+i)) {
			t.Fatalf("arrived as %q", arrived)
		}
	}
	if len(arrived) != calls {
		t.Errorf("%d arrived", len(arrived))
	}
}

// slow answers once it may.
type slow struct {
	grpc_health_v1.UnimplementedHealthServer
	answer chan struct{}
}

func (s slow) Check(context.Context, *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	<-s.answer
	return &grpc_health_v1.HealthCheckResponse{}, nil
}

// named makes the i-th call.
func named(ctx context.Context, conn *grpc.ClientConn, i int) error {
	ctx = metadata.AppendToOutgoingContext(ctx, "name", string(rune('A'+i)))
	_, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	return err
}
