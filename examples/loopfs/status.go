package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// codeOf maps kinds of errors to gRPC codes. The first match counts.
var codeOf = []struct {
	kind error
	code codes.Code
}{
	{disk.ErrInvalid, codes.InvalidArgument},
	{mount.ErrPath, codes.InvalidArgument},
	{mount.ErrFlag, codes.InvalidArgument},
	{disk.ErrNotFound, codes.NotFound},
	{disk.ErrBusy, codes.Aborted},
	{disk.ErrInUse, codes.FailedPrecondition},
	{disk.ErrExists, codes.AlreadyExists},
	{disk.ErrFull, codes.ResourceExhausted},
	{disk.ErrRange, codes.OutOfRange},
	{disk.ErrUnavailable, codes.FailedPrecondition},
	{disk.ErrDamaged, codes.DataLoss},
	{unix.ENOTDIR, codes.InvalidArgument}, // of a path that the caller gave
	{unix.ELOOP, codes.InvalidArgument},
	{unix.ENAMETOOLONG, codes.InvalidArgument},
	{unix.ENOSPC, codes.ResourceExhausted},
	{unix.EBUSY, codes.FailedPrecondition},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
}

// statusOf converts an error to a gRPC status.
func statusOf(err error) error {
	if _, done := status.FromError(err); err == nil || done {
		return err
	}
	for _, row := range codeOf {
		if errors.Is(err, row.kind) {
			return status.Error(row.code, err.Error())
		}
	}
	return status.Error(codes.Internal, err.Error())
}

// refusal returns the first invalid argument among errors, or the first error.
func refusal(reasons ...error) error {
	for _, err := range reasons {
		if status.Code(statusOf(err)) == codes.InvalidArgument {
			return err
		}
	}
	return cmp.Or(reasons...)
}

// logCalls returns an interceptor that converts errors to statuses and logs each call without its arguments.
func logCalls(log hclog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		began := time.Now()
		answer, err := next(ctx, req)
		var volume string
		if v, ok := req.(interface{ GetVolumeId() string }); ok {
			volume = v.GetVolumeId()
		}
		return answer, ended(log, info.FullMethod, volume, began, err)
	}
}

func logStreams(log hclog.Logger) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		began := time.Now()
		return ended(log, info.FullMethod, "", began, next(srv, stream))
	}
}

// ended logs the end of a call and returns its status.
func ended(log hclog.Logger, method, volume string, began time.Time, err error) error {
	fields := []any{"method", method, "volume", fmt.Sprintf("%.64s", volume),
		"took", time.Since(began).Round(time.Microsecond)}
	err = statusOf(err)
	if err == nil {
		log.Debug("call", fields...)
	} else {
		log.Warn("call failed", append(fields, "code", status.Code(err), "error", status.Convert(err).Message())...)
	}
	return err
}
