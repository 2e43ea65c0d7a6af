package wire

import (
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

func CallMetricProto(c registry.CallMetric) *pb.CallMetric {
	return &pb.CallMetric{
		Plugin: string(c.Plugin), Driver: c.Driver, Method: c.Method, Code: c.Code, Buckets: c.Buckets,
		Seconds: c.Seconds,
	}
}

// CallMetric converts a call metric. Its list of buckets has the right length, whatever the length in the message is.
func CallMetric(m *pb.CallMetric) registry.CallMetric {
	buckets := make([]uint64, len(registry.CallBuckets)+1)
	copy(buckets, m.GetBuckets())
	return registry.CallMetric{
		Plugin: registry.PluginID(m.GetPlugin()), Driver: m.GetDriver(), Method: m.GetMethod(), Code: m.GetCode(),
		Buckets: buckets, Seconds: m.GetSeconds(),
	}
}
