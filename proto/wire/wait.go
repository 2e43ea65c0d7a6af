package wire

import (
	"time"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// MaxWait bounds the wait of a Page.
const MaxWait = 10 * time.Minute

func waitProto(w registry.Wait) *pb.Wait {
	return &pb.Wait{
		Alloc: string(w.Alloc), Request: string(w.Request), Volume: VolumeNameProto(w.Volume), Step: string(w.Step),
		For: text(w.For), Rpc: string(w.RPC), Code: w.Code, Detail: text(w.Detail), Attempt: w.Attempt,
		Since: stamp(w.Since), Next: stamp(w.Next), Advice: text(w.Advice), Role: string(w.Role),
	}
}

func wait(m *pb.Wait) registry.Wait {
	return registry.Wait{
		Alloc: registry.AllocID(m.GetAlloc()), Request: registry.RequestName(m.GetRequest()),
		Volume: VolumeName(m.GetVolume()), Step: registry.Step(m.GetStep()), For: m.GetFor(),
		RPC: registry.RPC(m.GetRpc()), Code: m.GetCode(), Detail: m.GetDetail(), Attempt: m.GetAttempt(),
		Since: timeOf(m.GetSince()), Next: timeOf(m.GetNext()), Advice: m.GetAdvice(), Role: registry.Role(m.GetRole()),
	}
}

func maybeWaitProto(w *registry.Wait) *pb.Wait {
	if w == nil {
		return nil
	}
	return waitProto(*w)
}

func maybeWait(m *pb.Wait) *registry.Wait {
	if m == nil {
		return nil
	}
	w := wait(m)
	return &w
}

// VolumeUsageProto and VolumeUsage convert one unit of a volume's statistics.
func VolumeUsageProto(u registry.VolumeUsage) *pb.VolumeUsage {
	return &pb.VolumeUsage{Unit: u.Unit, Total: u.Total, Used: u.Used, Available: u.Available}
}

func VolumeUsage(m *pb.VolumeUsage) registry.VolumeUsage {
	return registry.VolumeUsage{Unit: m.GetUnit(), Total: m.GetTotal(), Used: m.GetUsed(), Available: m.GetAvailable()}
}

// DiagnosisProto and Diagnosis convert the result of a doctor run.
func DiagnosisProto(d registry.Diagnosis) *pb.DoctorReply {
	return &pb.DoctorReply{Findings: each(d.Findings, findingProto), Digest: d.Digest, Repaired: d.Repaired}
}

func Diagnosis(m *pb.DoctorReply) registry.Diagnosis {
	return registry.Diagnosis{Findings: each(m.GetFindings(), finding), Digest: m.GetDigest(),
		Repaired: m.GetRepaired()}
}

func findingProto(f registry.Finding) *pb.Finding {
	return &pb.Finding{
		Kind: string(f.Kind), Action: string(f.Action), Volume: VolumeNameProto(f.Name),
		Plugin:     string(f.Volume.Plugin),
		ExternalId: string(f.Volume.External), Alloc: string(f.Alloc), Request: string(f.Request), Path: text(f.Path),
		Detail: text(f.Detail), Advice: text(f.Advice), Result: text(f.Result),
	}
}

func finding(m *pb.Finding) registry.Finding {
	return registry.Finding{
		Kind: registry.FindingKind(m.GetKind()), Action: registry.FindingAction(m.GetAction()),
		Name: VolumeName(m.GetVolume()), Volume: volumeKey(m), Alloc: registry.AllocID(m.GetAlloc()),
		Request: registry.RequestName(m.GetRequest()), Path: m.GetPath(), Detail: m.GetDetail(),
		Advice: m.GetAdvice(), Result: m.GetResult(),
	}
}
