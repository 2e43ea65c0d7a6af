package taskdriver

import (
	"fmt"
	"os"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// programName is what tools like bpftool show.
const programName = "holdfast_dev"

// attach gives a version 2 group a program that the kernel asks at each open and mknod of a device. It is attached as such, not by
// a link: so it belongs to the group, outlives us, and is gone with the group. A group that the task makes below may add a program
// of its own, and both have to agree then.
func (p policy) attach(dir string) error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: programName, Type: ebpf.CGroupDevice, AttachType: ebpf.AttachCGroupDevice, License: "MPL-2.0", Instructions: p.program(),
	})
	if err != nil {
		return fmt.Errorf("load the program that confines devices: %w", err)
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
		return fmt.Errorf("attach the program that confines devices to %s: %w", dir, err)
	}
	return nil
}

// What the program keeps in which register.
const (
	verdict = asm.R0
	scratch = asm.R1 // the context, until that is read
	kind    = asm.R2
	wanted  = asm.R3
	major   = asm.R4
	minor   = asm.R5
)

// program is the policy for the kernel: 1 allows, 0 denies. Its argument is a struct bpf_cgroup_dev_ctx (linux/bpf.h): the wanted
// access above 16 bits of the kind of device, then the numbers.
func (p policy) program() asm.Instructions {
	prog := asm.Instructions{
		asm.LoadMem(kind, scratch, 0, asm.Word),
		asm.LoadMem(major, scratch, 4, asm.Word),
		asm.LoadMem(minor, scratch, 8, asm.Word),
		asm.Mov.Reg32(wanted, kind),
		asm.RSh.Imm32(wanted, 16),
		asm.And.Imm32(kind, 0xffff),
	}
	n := 0
	for _, rules := range [][]rule{p.rules, p.usual} {
		for _, r := range rules {
			prog = append(prog, p.step(r, "rule"+strconv.Itoa(n), "rule"+strconv.Itoa(n+1))...)
			n++
		}
	}
	return append(prog, asm.Mov.Imm32(verdict, asBit(p.open)).WithSymbol("rule"+strconv.Itoa(n)), asm.Return())
}

// step is one rule, at a label. It decides or goes to the next: a rule that gives decides if it gives all that is wanted, one that
// denies if it denies any of it.
func (p policy) step(r rule, label, next string) asm.Instructions {
	of := map[bool]int32{true: unix.BPF_DEVCG_DEV_BLOCK, false: unix.BPF_DEVCG_DEV_CHAR}[r.of.block]
	step := asm.Instructions{asm.JNE.Imm(kind, of, next).WithSymbol(label)}
	if r.of.major != each {
		step = append(step, asm.JNE.Imm(major, int32(r.of.major), next))
	}
	if r.of.minor != each {
		step = append(step, asm.JNE.Imm(minor, int32(r.of.minor), next))
	}
	step = append(step, asm.Mov.Reg32(scratch, wanted))
	if p.open {
		step = append(step, asm.And.Imm32(scratch, int32(r.can)), asm.JEq.Imm(scratch, 0, next))
	} else {
		step = append(step, asm.And.Imm32(scratch, ^int32(r.can)), asm.JNE.Imm(scratch, 0, next))
	}
	return append(step, asm.Mov.Imm32(verdict, asBit(!p.open)), asm.Return())
}

func asBit(b bool) int32 {
	if b {
		return 1
	}
	return 0
}
