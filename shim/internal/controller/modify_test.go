package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

func modifies() table {
	return of(registry.CreateDelete, registry.ControllerExpand, registry.ModifyVolume)
}

func tier(value string) map[string]string { return map[string]string{"tier": value} }

const (
	modifyGold   = "ControllerModifyVolume vol-data map[tier:gold]"
	modifySilver = "ControllerModifyVolume vol-data map[tier:silver]"
)

// The table has the record after each answer, and the parameters that a further modification then sends.
func TestModificationOfEachOutcome(t *testing.T) {
	for what, c := range map[string]struct {
		faults  []fault
		err     string // the error of the first modification; "": none
		calls   []string
		unknown bool   // the value of tier is not known
		then    string // the parameters that a further modification of iops sends
	}{
		"done": {nil, "", []string{modifyGold}, false, "map[iops:5]"},
		"refused": {[]fault{failed("INVALID_ARGUMENT")}, "INVALID_ARGUMENT", []string{modifyGold}, false,
			"map[iops:5]"},
		"no answer, then done": {[]fault{uncertain("UNAVAILABLE", true)}, "", []string{modifyGold, modifyGold}, false,
			"map[iops:5]"},
		"no answer, then refused": {[]fault{uncertain("UNAVAILABLE", false), failed("INVALID_ARGUMENT")},
			"INVALID_ARGUMENT", []string{modifyGold, modifyGold}, false, "map[iops:5]"},
		"no answer, then not looked at": {[]fault{uncertain("UNAVAILABLE", true), failed("PERMISSION_DENIED")},
			"whether tier changed is not known", []string{modifyGold, modifyGold}, true, "map[iops:5 tier:gold]"},
		"an error inside the plugin": {slices.Repeat([]fault{failed("INTERNAL")}, 3),
			"whether tier changed is not known", []string{modifyGold, modifyGold, modifyGold}, true,
			"map[iops:5 tier:gold]"},
	} {
		runInBubble(t, what, func(t *testing.T) {
			v := ready()
			v.Mutable = tier("silver")
			d := open(t, modifies(), v)
			d.faults = c.faults
			_, err := d.Controller.Modify(t.Context(), call, name, tier("gold"))
			wantErr(t, "", err, nil, c.err)
			d.expect(c.calls...)
			got, _ := d.stored()
			want := map[bool]string{true: "gold", false: "silver"}[err == nil]
			if got.Mutable["tier"] != want || got.Modification.Open() != c.unknown {
				t.Errorf("%v, %+v", got.Mutable, got.Modification)
			}
			got, err = d.Controller.Modify(t.Context(), call, name, map[string]string{"iops": "5"})
			if err != nil || got.Mutable["iops"] != "5" || got.Modification.Open() ||
				c.unknown && got.Mutable["tier"] != "gold" {
				t.Errorf("further: %v, %+v, %v", got.Mutable, got.Modification, err)
			}
			d.expect("ControllerModifyVolume vol-data " + c.then)
			if _, err := d.Controller.Modify(t.Context(), call, name, maps.Clone(got.Mutable)); err != nil {
				t.Errorf("the same again: %v", err)
			}
			d.expect()
		})
	}
}

// A modification continues after its caller has gone, also in the next process. Other operations wait for its outcome.
// A newer modification replaces its values.
func TestModificationGoesOnWithoutItsCaller(t *testing.T) {
	for what, c := range map[string]struct {
		next  func(*desk, context.Context) error
		calls []string
		tier  string
	}{
		"nothing else": {nil, []string{modifyGold}, "gold"},
		"another modification": {func(d *desk, ctx context.Context) error {
			_, err := d.Controller.Modify(ctx, call, name, tier("silver"))
			return err
		}, []string{modifyGold, modifySilver}, "silver"},
		"an expansion": {func(d *desk, ctx context.Context) error {
			_, err := d.Controller.Expand(ctx, call, name, upTo(large, 0))
			return err
		}, []string{modifyGold, "ControllerExpandVolume vol-data 2097152..0"}, "gold"},
		"its deletion": {func(d *desk, ctx context.Context) error { return d.Controller.Delete(ctx, call, name) },
			[]string{modifyGold, "DeleteVolume vol-data"}, ""},
	} {
		for _, crash := range []bool{false, true} {
			runInBubble(t, what, func(t *testing.T) {
				d := open(t, modifies(), ready())
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				defer cancel()
				d.faults = []fault{uncertain("DEADLINE_EXCEEDED", true)}
				_, err := d.Controller.Modify(ctx, call, name, tier("gold"))
				if !errors.Is(err, registry.ErrUncertain) ||
					!strings.Contains(err.Error(), "Holdfast repeats the call") {
					t.Fatal(err)
				}
				d.expect(modifyGold)
				if crash {
					d.crash()
				}
				if c.next != nil {
					noErr(t, "", c.next(d, t.Context()))
				}
				d.runFor(time.Hour)
				if v, _ := d.stored(); v.Mutable["tier"] != c.tier || v.Modification.Open() {
					t.Errorf("%v, %+v", v.Mutable, v.Modification)
				}
				d.expect(c.calls...)
			})
		}
	}
}

// If a modification is uncertain, it stays so while another one is refused. This holds if the shim dies meanwhile, and
// if the refused one repeats an earlier modification.
func TestRefusedModificationKeepsEarlierDoubt(t *testing.T) {
	for at, refused := range []string{"silver", "silver", "gold", "gold"} {
		crash := at%2 == 1
		synctest.Test(t, func(t *testing.T) {
			d := open(t, modifies(), ready())
			modify := func(ctx context.Context, value string) {
				if _, err := d.Controller.Modify(ctx, call, name, tier(value)); err == nil {
					t.Errorf("the modification to %s is done", value)
				}
			}
			for _, value := range []string{"gold", "bronze"} {
				d.faults = slices.Repeat([]fault{failed("INTERNAL")}, 3)
				modify(t.Context(), value)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			d.faults = []fault{uncertain("DEADLINE_EXCEEDED", false), failed("INVALID_ARGUMENT")}
			modify(ctx, refused)
			if crash {
				d.crash()
			}
			d.runFor(time.Hour)
			for _, value := range []string{"bronze", "gold"} {
				if v, _ := d.stored(); !v.Modification.Open() || v.Modification.Asked["tier"] != value {
					t.Errorf("the doubt about %s is %+v", value, v.Modification)
				}
				d.faults = []fault{failed("INVALID_ARGUMENT")}
				modify(t.Context(), value)
			}
			if v, _ := d.stored(); v.Modification.Open() {
				t.Errorf("all are refused, and %+v is in doubt", v.Modification)
			}
		})
	}
}

// No doubt is dropped: after many modifications without a certain outcome, only the last one may be sent again.
func TestManyModificationsInDoubtEndWithTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, modifies(), ready())
		d.faults = slices.Repeat([]fault{failed("INTERNAL")}, 3*9)
		for i := range 9 {
			_, err := d.Controller.Modify(t.Context(), call, name, tier([]string{"gold", "silver"}[i%2]))
			if err == nil {
				t.Error("a modification is done")
			}
		}
		d.journal = nil
		_, err := d.Controller.Modify(t.Context(), call, name, tier("silver"))
		wantErr(t, "the tenth", err, registry.ErrConflict, "its last 9 modifications")
		if v, err := d.Controller.Modify(t.Context(), call, name, tier("gold")); err != nil || v.Modification.Open() {
			t.Errorf("the last once more: %v", err)
		}
		d.expect(modifyGold)
	})
}

// A modification that cannot be sent is refused before a call.
func TestModificationIsRefusedBeforeTheCall(t *testing.T) {
	deleting, creating := ready(), spec()
	deleting.State = registry.VolumeDeleting
	creating.Mutable = tier("gold")
	register := ready().VolumeSpec
	register.ID, register.External, register.Mutable = "other", "vol-other", tier("gold")
	do := func(parameters map[string]string) func(*desk, context.Context) error {
		return func(d *desk, ctx context.Context) error {
			_, err := d.Controller.Modify(ctx, call, name, parameters)
			return err
		}
	}
	for what, c := range map[string]struct {
		plugin table
		record []registry.Record
		do     func(*desk, context.Context) error
		want   string
	}{
		"no parameter": {modifies(), []registry.Record{ready()}, do(nil), "no mutable parameter is given"},
		"no name": {modifies(), []registry.Record{ready()}, do(map[string]string{"": "x"}),
			"has no name"},
		"an unknown volume":      {modifies(), nil, do(tier("gold")), "not found"},
		"a volume being deleted": {modifies(), []registry.Record{deleting}, do(tier("gold")), "it is deleting"},
		"without the capability": {expands(), []registry.Record{ready()}, do(tier("gold")),
			"lacks controller.MODIFY_VOLUME"},
		"creation without it": {expands(), nil, func(d *desk, ctx context.Context) error {
			_, err := d.Controller.Create(ctx, call, creating)
			return err
		}, "remove mutable_parameters"},
		"registration without it": {expands(), nil, func(d *desk, ctx context.Context) error {
			_, err := d.Register(ctx, register)
			return err
		}, "remove mutable_parameters"},
	} {
		t.Run(what, func(t *testing.T) {
			d := open(t, c.plugin, c.record...)
			wantErr(t, "", c.do(d, t.Context()), nil, c.want)
			d.expect()
		})
	}
}
