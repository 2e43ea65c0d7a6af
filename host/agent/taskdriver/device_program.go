//go:build !taskparent

package taskdriver

import (
	"fmt"
	"os"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// attachProgram attaches a program to a version 2 cgroup. The kernel runs it at each open and mknod of a device. It is
// attached without a link, so it stays until the cgroup is removed. A process in a cgroup below gets access only if the
// programs of that cgroup allow it too.
func (p devicePolicy) attachProgram(dir string) error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "holdfast_dev", Type: ebpf.CGroupDevice, AttachType: ebpf.AttachCGroupDevice, License: "MPL-2.0",
		Instructions: p.program(),
	})
	if err != nil {
		return fmt.Errorf("load the device program: %w", err)
	}
	defer prog.Close()
	group, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer group.Close()
	err = link.RawAttachProgram(link.RawAttachProgramOptions{
		Target: int(group.Fd()), Program: prog, Attach: ebpf.AttachCGroupDevice, Flags: unix.BPF_F_ALLOW_MULTI,
	})
	if err != nil {
		return fmt.Errorf("attach the device program to %s: %w", dir, err)
	}
	return nil
}

// Registers of the program.
const (
	regVerdict = asm.R0
	regScratch = asm.R1 // at first the context
	regType    = asm.R2
	regAccess  = asm.R3
	regMajor   = asm.R4
	regMinor   = asm.R5
)

// program returns instructions that return 1 to allow and 0 to deny. Their context is struct bpf_cgroup_dev_ctx
// (linux/bpf.h): the access in the upper and the device type in the lower 16 bits of the first word, then major and
// minor.
func (p devicePolicy) program() asm.Instructions {
	prog := asm.Instructions{
		asm.LoadMem(regType, regScratch, 0, asm.Word),
		asm.LoadMem(regMajor, regScratch, 4, asm.Word),
		asm.LoadMem(regMinor, regScratch, 8, asm.Word),
		asm.Mov.Reg32(regAccess, regType),
		asm.RSh.Imm32(regAccess, 16),
		asm.And.Imm32(regType, 0xffff),
	}
	label := func(n int) string { return "rule" + strconv.Itoa(n) }
	rules := slices.Concat(p.rules, p.defaults)
	for n, r := range rules {
		prog = append(prog, r.instructions(label(n), label(n+1))...)
	}
	return append(prog, asm.Mov.Imm32(regVerdict, 0).WithSymbol(label(len(rules))), asm.Return())
}

// instructions returns code that allows the access if the rule allows all of it, and otherwise jumps to next.
func (r deviceRule) instructions(label, next string) asm.Instructions {
	deviceType := int32(unix.BPF_DEVCG_DEV_CHAR)
	if r.block {
		deviceType = unix.BPF_DEVCG_DEV_BLOCK
	}
	out := asm.Instructions{asm.JNE.Imm(regType, deviceType, next).WithSymbol(label)}
	if r.major != anyNumber {
		out = append(out, asm.JNE.Imm(regMajor, int32(r.major), next))
	}
	if r.minor != anyNumber {
		out = append(out, asm.JNE.Imm(regMinor, int32(r.minor), next))
	}
	return append(out,
		asm.Mov.Reg32(regScratch, regAccess), asm.And.Imm32(regScratch, ^int32(r.access)),
		asm.JNE.Imm(regScratch, 0, next),
		asm.Mov.Imm32(regVerdict, 1), asm.Return())
}
