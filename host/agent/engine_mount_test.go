package agent

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/internal/mount"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// The callers of the tests: two processes of dockerd, the first of which has ended, and an ended process of Podman.
var (
	dockerdThatDied = EngineCaller{PID: 1 << 30, Start: 1}
	dockerd         = EngineCaller{PID: os.Getpid(), Start: ownStart()}
	podman          = EngineCaller{PID: 1 << 30, Start: 2, Daemonless: true}
)

func ownStart() uint64 {
	s, _ := proc.ReadStat(os.Getpid())
	return s.Start
}

// withEnginePlugin is withAgent with a running plugin "disk".
func withEnginePlugin(t *testing.T, test func(e *env)) {
	withAgent(t, func(e *env) {
		e.submit(pluginJob("disk"))
		e.awaitRunning("disk")
		test(e)
	})
}

func (e *env) engineRequest(id string, caller EngineCaller) EngineRequest {
	return EngineRequest{Volume: "notes", Plugin: "disk", Sealed: hooks.Sealed("group"), ID: id, Caller: caller}
}

func (e *env) tryEngineMount(id string, caller EngineCaller) error {
	path, answered, err := e.agent.MountForEngine(e.Context(), e.shim, e.engineRequest(id, caller))
	if answered != nil {
		answered(true)
	}
	if (path == "/vol") != (err == nil) {
		e.Errorf("path %q with error %v", path, err)
	}
	return err
}

func (e *env) engineMount(id string, caller EngineCaller) {
	e.Helper()
	e.must(e.tryEngineMount(id, caller))
}

func (e *env) engineUnmount(id string, caller EngineCaller) {
	e.Helper()
	answered, err := e.agent.UnmountForEngine(e.Context(), e.shim, e.engineRequest(id, caller))
	e.must(err)
	if answered != nil {
		answered(true)
	}
}

// engineUses checks how often the volume was prepared and released, and which IDs hold it.
func (e *env) engineUses(prepared, released int, ids ...string) {
	e.Helper()
	synctest.Wait()
	e.hasCount("prepared container-engine", prepared)
	e.hasCount("released container-engine", released)
	m := e.agent.EngineMount("notes")
	if (m == nil) != (len(ids) == 0) {
		e.Fatalf("the record is %+v, want holders %q", m, ids)
	}
	for _, id := range ids {
		if m.Holders[id].Count == 0 || len(m.Holders) != len(ids) {
			e.Errorf("holders %+v, want %q", m.Holders, ids)
		}
	}
}

func TestTrapD1CountsPerID(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineMount("a", dockerd)
		e.engineMount("b", dockerd)
		e.engineMount("podman", podman)
		e.engineUses(1, 0, "a", "b", "podman")
		e.engineUnmount("a", dockerd)
		e.engineUnmount("a", dockerd) // one time too often: it must not affect others
		e.engineUnmount("b", dockerd)
		e.engineUses(1, 0, "podman")
		e.restart(nil)
		e.engineUses(1, 0, "podman")
		e.engineUnmount("podman", podman)
		e.engineUses(1, 1)
	})
}

func TestTrapD2CopyBesideARunningContainer(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineMount("a", dockerd)
		e.engineMount("a", dockerd)
		e.engineUnmount("a", dockerd)
		e.engineUses(1, 0, "a")
		e.engineUnmount("a", dockerd)
		e.engineUses(1, 1)
	})
}

func TestTrapD3UnmountAfterAFailedMount(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineUnmount("a", dockerd)
		e.shim.prepare = func(host.AllocGroup) error { return errors.New("no such device") }
		e.hasError(e.tryEngineMount("a", dockerd), nil, "no such device")
		e.engineUses(0, 1) // a mount that may have begun is released
		e.engineUnmount("a", dockerd)
		e.engineUses(0, 1)
		e.shim.prepare, e.shim.release = nil, func(host.AllocID) error { return errors.New("busy") }
		e.engineMount("a", dockerd)
		e.shim.prepare = func(host.AllocGroup) error { return errors.New("no such device") }
		e.engineMount("b", dockerd) // mounted already
		e.engineUnmount("b", dockerd)
		e.engineUses(1, 1, "a")
	})
}

// Docker was killed without live-restore. It never unmounts for the containers that died with it, and starts some of
// them again with the same ID.
func TestTrapD4EngineKilledWithItsContainers(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineMount("a", dockerdThatDied)
		e.engineMount("b", dockerdThatDied)
		e.engineMount("a", dockerd)
		e.mountUsers.Store(1)
		time.Sleep(2 * engineReview)
		e.engineUses(1, 0, "a", "b")
		e.engineUnmount("a", dockerd)
		e.engineUses(1, 0, "b") // some container still uses the mount
		e.mountUsers.Store(0)
		time.Sleep(2 * engineReview)
		e.engineUses(1, 1)
	})
}

// With live-restore, containers outlive their engine. If the next engine process runs docker cp beside a container,
// the count goes to one and back to zero.
func TestTrapD5CountOfALivingContainerIsLost(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineMount("a", dockerdThatDied)
		e.mountUsers.Store(1)
		e.engineMount("a", dockerd)
		e.engineUnmount("a", dockerd)
		time.Sleep(2 * engineReview)
		e.hasCount("released", 0)
		e.engineMount("b", dockerd) // joins the mount that is used
		e.engineUses(1, 0, "b")
		e.engineUnmount("b", dockerd)
		e.mountUsers.Store(0)
		e.engineUnmount("a", dockerd) // the container ends
		e.engineUses(1, 1)
	})
}

func TestTrapD6RequestRepeatedAfterALostAnswer(t *testing.T) {
	t.Run("the agent died before the mount", func(t *testing.T) {
		withEnginePlugin(t, func(e *env) {
			first := make(chan host.AllocID, 2)
			e.shim.prepare = func(g host.AllocGroup) error { first <- g.Alloc; return nil }
			e.shim.hang = true
			ctx, cancel := context.WithCancel(e.Context())
			lost := make(chan struct{})
			go func() {
				defer close(lost)
				_, _, _ = e.agent.MountForEngine(ctx, e.shim, e.engineRequest("a", dockerd))
			}()
			synctest.Wait()
			cut := *e.agent.EngineMount("notes")
			cancel()
			<-lost
			e.shim.hang = false
			e.must(e.agent.setEngineMount("notes", &cut)) // as a killed agent leaves it
			e.engineMount("a", dockerd)
			if again := <-first; again != cut.Alloc {
				t.Errorf("alloc %s continues as %s", cut.Alloc, again)
			}
			e.engineUnmount("a", dockerd)
			e.engineUses(1, 2)
			e.must(e.agent.setEngineMount("notes", &cut)) // and the engine does not ask again
			time.Sleep(2 * engineReview)
			e.engineUses(1, 3)
		})
	})
	t.Run("counted twice", func(t *testing.T) {
		withEnginePlugin(t, func(e *env) {
			e.engineMount("a", dockerd)
			e.engineMount("a", dockerd)
			e.engineUnmount("a", dockerd)
			time.Sleep(unusedLimit - engineReview)
			e.engineUses(1, 0, "a")
			time.Sleep(3 * engineReview)
			e.engineUses(1, 1)
		})
	})
	for _, by := range []EngineCaller{dockerd, podman} {
		t.Run("the volume is removed by "+by.Name(), func(t *testing.T) {
			withEnginePlugin(t, func(e *env) {
				e.engineMount("a", by)
				e.mountUsers.Store(1)
				e.must(e.agent.ForgetForEngine(e.Context(), e.shim, e.engineRequest("", by)))
				e.engineUses(1, 0, "a")
				e.mountUsers.Store(0)
				other := map[string]EngineCaller{"docker": podman, "podman": dockerd}[by.Name()]
				e.must(e.agent.ForgetForEngine(e.Context(), e.shim, e.engineRequest("", other)))
				e.engineUses(1, 0, "a")
				e.must(e.agent.ForgetForEngine(e.Context(), e.shim, e.engineRequest("", by)))
				e.engineUses(1, 1)
			})
		})
	}
}

// Each process of Podman ends while its containers run. All stores on a machine send the same ID.
func TestTrapD7PodmanHasOneIDAndNoDaemon(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineMount("constant", podman)
		e.mountUsers.Store(1) // a container of one store
		next := podman
		next.Start++
		e.engineMount("constant", next)
		e.mountUsers.Store(0)
		time.Sleep(10 * unusedLimit)
		e.engineUnmount("constant", podman)
		e.engineUses(1, 0, "constant")
		e.shim.stuck.Store(true)
		began := time.Now()
		e.engineUnmount("constant", podman)
		if took := time.Since(began); took >= 5*time.Second {
			t.Errorf("Podman does not wait for %v", took)
		}
		e.shim.stuck.Store(false)
		time.Sleep(2 * engineReview)
		e.engineUses(1, 1)
	})
}

// Podman counts a volume as mounted after a failed unmount, so the agent has to count in the same way.
func TestTrapD7UnmountAnswersWhileAnotherRequestRuns(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineMount("constant", podman)
		unlock, err := e.agent.lockEngineMount(e.Context(), "notes")
		e.must(err)
		began := time.Now()
		_, err = e.agent.UnmountForEngine(e.Context(), e.shim, e.engineRequest("constant", podman))
		e.hasError(err, context.DeadlineExceeded, "wait for another request")
		if took := time.Since(began); took >= 5*time.Second {
			t.Errorf("Podman does not wait for %v", took)
		}
		unlock()
		e.engineUses(1, 0, "constant")
	})
}

// If Podman does not get the answer to an unmount, nothing changes, because Podman's next container uses the directory
// without a request.
func TestTrapD7UnmountWithoutAnswerChangesNothing(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineMount("constant", podman)
		answered, err := e.agent.UnmountForEngine(e.Context(), e.shim, e.engineRequest("constant", podman))
		e.must(err)
		e.engineUses(1, 0, "constant") // as an agent that is killed now leaves it
		answered(false)
		e.engineUses(1, 0, "constant")
		e.engineUnmount("constant", podman)
		e.engineUses(1, 1)
	})
}

// A mount that Podman did not wait for is taken back before the next request with the same ID. The next request is
// carried out as well.
func TestTrapD7LostMountLeavesTheNextMount(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		_, answered, err := e.agent.MountForEngine(e.Context(), e.shim, e.engineRequest("constant", podman))
		e.must(err)
		next := make(chan error, 1)
		go func() { next <- e.tryEngineMount("constant", podman) }()
		synctest.Wait()
		answered(false)
		e.must(<-next)
		e.engineUses(2, 1, "constant")
	})
}

func TestTrapD8Reboot(t *testing.T) {
	for _, again := range []bool{true, false} {
		withEnginePlugin(t, func(e *env) {
			e.engineMount("a", dockerd)
			e.engineMount("constant", podman)
			old := *e.agent.EngineMount("notes")
			old.Boot = "another"
			e.must(e.agent.setEngineMount("notes", &old))
			if again {
				e.engineMount("a", dockerd)
				e.engineUses(2, 1, "a")
				return
			}
			time.Sleep(2 * engineReview)
			e.engineUses(1, 1)
		})
	}
}

// A starting dockerd answers no request before it has mounted the volumes of its containers.
func TestTrapD9PluginInAContainerOfTheWaitingEngine(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.setShim(func(s *fakeShim) { s.plugins[0].sick = true })
		e.engineMount("a", dockerd) // the plugin's task has driver exec
		e.shim.stuck.Store(true)
		e.engineUnmount("a", dockerd) // its release waits for the plugin
		for _, r := range e.agent.Allocs() {
			r.Group.Tasks[0].Driver = "docker"
		}
		began := time.Now()
		e.hasError(e.tryEngineMount("a", dockerd), registry.ErrUnavailable, `plugin "disk"`, "holdfast plugin status")
		if took := time.Since(began); took > releaseWait {
			t.Errorf("refused after %v", took)
		}
		e.shim.stuck.Store(false)
		time.Sleep(2 * engineReview)
		e.engineUses(1, 1)
		e.engineMount("constant", podman)
		e.engineMount("a", dockerd) // needs no plugin
		e.engineUses(2, 1, "a", "constant")
		e.stopJob("disk", StopOptions{Force: true})
		e.awaitState("disk", AllocStopped)
		e.engineMount("b", dockerd)
		e.engineUnmount("constant", podman)
		e.engineUnmount("a", dockerd)
		e.engineUnmount("b", dockerd)
		e.hasError(e.tryEngineMount("a", dockerd), registry.ErrUnavailable, `plugin "disk" is not running`)
		e.engineUses(2, 2)
	})
}

// No engine repeats an unmount.
func TestTrapD10ReleaseThatFailsIsContinued(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		var busy atomic.Bool
		busy.Store(true)
		e.shim.release = func(host.AllocID) error {
			if busy.Load() {
				return errors.New("busy")
			}
			return nil
		}
		e.engineMount("a", dockerd)
		e.engineUnmount("a", dockerd)
		e.hasCount("released", 0)
		e.hasError(e.tryEngineMount("b", dockerd), nil, "release its previous mount: busy")
		busy.Store(false)
		time.Sleep(2 * engineReview)
		e.engineUses(1, 1)
	})
}

// Two stores of Podman send the same ID. A container that the first store is still starting does not use the mount yet.
func TestTrapD7PodmanOfAnotherStoreMountsDuringAStart(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineMount("constant", EngineCaller{PID: os.Getpid(), Start: ownStart(), Daemonless: true})
		e.engineMount("constant", podman)
		e.engineUnmount("constant", podman)
		e.engineUses(1, 0, "constant")
		e.engineUnmount("constant", podman)
		e.engineUses(1, 1)
	})
}

// If Podman is killed after the answer to a mount, it has counted nothing, so its next container mounts again.
func TestTrapD13PodmanIsKilledBeforeItCounts(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.engineMount("constant", podman)
		e.engineMount("constant", podman)
		e.engineUnmount("constant", podman)
		e.engineUses(1, 1)
	})
}

func TestPrivateCopyOfANamespaceIsNoContainer(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.agent.engine.users = func(paths []string) (map[string][]mount.User, error) {
			copies := []mount.User{{PID: 7, There: hooks.Layout{State: e.dir}.MountRoot() + "/disk/stage/x"}}
			return map[string][]mount.User{paths[0]: copies}, nil
		}
		e.engineMount("a", dockerd)
		e.engineUnmount("a", dockerd)
		e.engineUses(1, 1)
	})
}

func TestReviewOfUsedMountsReadsProcessesOnce(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		var reads, used atomic.Int32
		used.Store(1)
		e.agent.engine.users = func(paths []string) (map[string][]mount.User, error) {
			reads.Add(1)
			return map[string][]mount.User{paths[0]: make([]mount.User, used.Load())}, nil
		}
		for _, volume := range []host.VolumeID{"notes", "more"} {
			r := e.engineRequest("a", dockerd)
			r.Volume = volume
			_, answered, err := e.agent.MountForEngine(e.Context(), e.shim, r)
			e.must(err)
			answered(true)
		}
		time.Sleep(10 * engineReview)
		if n := reads.Load(); n == 0 || n > 11 {
			t.Errorf("%d reads in 10 reviews", n)
		}
		used.Store(0)
		time.Sleep(unusedLimit + 2*engineReview)
		e.hasCount("released container-engine", 2)
	})
}

// A mount that nothing uses is made anew if it is gone, or if a person has released its claim by force. The shim
// reports no event for either.
func TestUnusableMountIsMadeAnew(t *testing.T) {
	for name, spoil := range map[string]func(*env){
		"unmounted": func(e *env) { e.unmounted.Store(true) },
		"no claim": func(e *env) {
			e.setShim(func(s *fakeShim) { s.lost = e.agent.EngineMount("notes").Alloc })
		},
	} {
		t.Run(name, func(t *testing.T) {
			withEnginePlugin(t, func(e *env) {
				e.engineMount("a", dockerd)
				spoil(e)
				e.engineMount("b", dockerd)
				e.engineUses(2, 1, "b")
			})
		})
	}
}

func TestMountThatTakesTooLongSaysWhatItWaitsFor(t *testing.T) {
	withEnginePlugin(t, func(e *env) {
		e.shim.hang = true
		e.shim.waiting = []registry.Wait{{Step: registry.StepClaim, Detail: "volume notes is claimed by alloc x"}}
		began := time.Now()
		e.hasError(e.tryEngineMount("a", dockerd), registry.ErrUnavailable, "claimed by alloc x")
		if took := time.Since(began); took >= 2*time.Minute {
			t.Errorf("Docker does not wait for %v", took)
		}
		e.engineUses(0, 1)
	})
}

// A node that was out of service has lost the volumes of its containers, and the agent cannot stop these. No other
// container may join them, and the log has the command to stop them. Once they have stopped, the volume is released and
// mounted again.
func TestLostVolumeIsRefusedUntilItsContainersStop(t *testing.T) {
	for name, lose := range map[string]func(*env, host.AllocID){
		"while the agent runs": func(e *env, id host.AllocID) {
			e.shim.events <- host.Event{Kind: registry.EventVolumesLost, Alloc: id, Detail: "node1 was fenced"}
		},
		"before it starts": func(e *env, id host.AllocID) { e.restart(nil) },
		"unnoticed":        func(*env, host.AllocID) {},
	} {
		t.Run(name, func(t *testing.T) {
			withEnginePlugin(t, func(e *env) {
				e.engineMount("a", dockerd)
				e.mountUsers.Store(1)
				m := e.agent.EngineMount("notes")
				e.setShim(func(s *fakeShim) { s.lost = m.Alloc })
				lose(e, m.Alloc)
				synctest.Wait()
				time.Sleep(2 * unusedLimit)
				e.hasError(e.tryEngineMount("b", dockerd), registry.ErrConflict, `lost volume "notes"`,
					"docker ps --filter volume=notes")
				lost, err := e.agent.LostEngineMounts(e.Context(), e.shim)
				e.must(err)
				if len(lost) != 1 || lost[0].Volume != "notes" || lost[0].Stop != "docker ps --filter volume=notes" {
					t.Errorf("lost mounts: %+v", lost)
				}
				e.engineUses(1, 0, "a")
				e.mountUsers.Store(0)
				if name == "unnoticed" {
					e.engineUnmount("a", dockerd)
				}
				time.Sleep(2 * engineReview) // Docker may hold a mount that no container uses
				e.engineUses(1, 1)
				e.engineMount("b", dockerd)
				e.engineUses(2, 1, "b")
			})
		})
	}
}
