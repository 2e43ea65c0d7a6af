package csi

import (
	"context"
	"net"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// lines numbers the connections that are made for c, and holds calls to theirs: gRPC itself would send a call over whatever connection there is
// by then, which may lead to another process than the one that was asked what it is.
type lines struct {
	credentials.TransportCredentials
	conn *Conn
}

func numbered(c *Conn) lines { return lines{insecure.NewCredentials(), c} }

// line is the number of a connection.
type line struct {
	credentials.AuthInfo
	number uint64
}

func (l lines) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := l.TransportCredentials.ClientHandshake(ctx, authority, raw)
	return conn, line{info, l.conn.made.Add(1)}, err
}

func (l lines) Clone() credentials.TransportCredentials {
	return lines{l.TransportCredentials.Clone(), l.conn}
}

type lineKey struct{}

// over is ctx for a call that may go over the connection of that number only.
func over(ctx context.Context, number uint64) context.Context {
	return context.WithValue(ctx, lineKey{}, number)
}

// sameLine refuses a call that is about to go over another connection than it may.
type sameLine struct{}

var _ credentials.PerRPCCredentials = sameLine{}

func (sameLine) RequireTransportSecurity() bool { return false }

func (sameLine) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	want, held := ctx.Value(lineKey{}).(uint64)
	if !held {
		return nil, nil
	}
	info, _ := credentials.RequestInfoFromContext(ctx)
	if at, is := info.AuthInfo.(line); !is || at.number != want {
		return nil, status.Error(codes.Unavailable, "the connection to the plugin was lost, and there is another one")
	}
	return nil, nil
}
