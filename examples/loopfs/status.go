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

// codeOf is the one table from kinds of error to gRPC codes; the first that matches counts.
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

// statusOf is an error as gRPC carries it.
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

// refusal picks the reason to give of several: what is wrong with the request as such comes before what it is about.
func refusal(reasons ...error) error {
	for _, err := range reasons {
		if status.Code(statusOf(err)) == codes.InvalidArgument {
			return err
		}
	}
	return cmp.Or(reasons...)
}

// edge is around every call: it turns errors into statuses and logs how the call ended, never what it carried.
func edge(log hclog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		began := time.Now()
		answer, err := next(ctx, req)
		err = statusOf(err)
		fields := []any{"method", info.FullMethod, "took", time.Since(began).Round(time.Microsecond)}
		if v, ok := req.(interface{ GetVolumeId() string }); ok {
			fields = append(fields, "volume", fmt.Sprintf("%.64s", v.GetVolumeId()))
		}
		if err == nil {
			log.Debug("call", fields...)
		} else {
			log.Warn("call failed", append(fields, "code", status.Code(err), "error", status.Convert(err).Message())...)
		}
		return answer, err
	}
}
