// Package csi speaks CSI to plugins. A Fleet holds one connection per plugin task; its methods are CSI calls with the
// requests and answers of requests.go. CSI's generated types stay in this package.
//
// A link is one connection to one plugin process. The process describes itself over its link before it gets any other
// call. If it differs from the registered plugin, it gets no call, because another process may listen at the socket.
//
// Plugins are not trusted. Each answer has a size limit. Answers are read nil-safe, and it is the caller who checks
// them. Texts are bounded, and secrets are masked in them: those of the call, those that the plugin was sent before
// (TestSecretsDoNotLeakIntoOtherCalls), and those that the caller names. The error of a call to a
// plugin is a *registry.CallError, or that of the function that receives the answer. The outcome of a CallError says
// whether the call may still take effect (TestOutcomeOfEveryCode).
package csi
